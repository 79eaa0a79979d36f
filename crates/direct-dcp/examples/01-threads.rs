//! Four ranks as threads of one process, each with its share of the rows of one sequence.
//!
//! Run it: `cargo run --example 01-threads`

use direct_dcp::{DType, Group, KvGather, RowFormat, Workspace, WorkspaceOptions};
use std::error::Error;
use std::thread;

const RANKS: usize = 4;
/// Rows that each rank holds.
const ROWS: usize = 128;
/// A row of multi-head latent attention: 512 values of compressed KV and 64 with positions.
const ROW: RowFormat = RowFormat::new(DType::BF16, 576);

fn main() -> Result<(), Box<dyn Error + Send + Sync>> {
    let ranks: Vec<_> = Group::threads(RANKS)?
        .into_iter()
        .map(|group| thread::spawn(move || rank(&group)))
        .collect();
    for rank in ranks {
        rank.join().map_err(|_| "a rank panicked")??;
    }
    println!("all {RANKS} ranks have the rows of all");
    Ok(())
}

/// What one rank does.
fn rank(group: &Group) -> Result<(), Box<dyn Error + Send + Sync>> {
    // Every rank asks for the same memory, which takes up to 1,024 rows over all ranks.
    let workspace = Workspace::new(group, WorkspaceOptions::new(1024, ROW))?;
    let gather = KvGather::new(workspace);

    let local: Vec<u8> = (0..ROWS)
        .flat_map(|row| row_of(group.rank(), row))
        .collect();
    let mut gathered = vec![0; RANKS * local.len()];
    gather.gather_into(0, &local, &mut gathered)?;

    // Rank-major: first all rows of rank 0, then those of rank 1, ...
    for (i, row) in gathered.chunks(ROW.row_bytes()).enumerate() {
        assert_eq!(row, row_of(i / ROWS, i % ROWS), "row {i}");
    }
    println!(
        "rank {} sent {ROWS} rows of {ROW} and got {} by {}",
        group.rank(),
        gathered.len() / ROW.row_bytes(),
        gather.workspace().way()
    );
    Ok(())
}

/// Something to send that is different in every row.
fn row_of(rank: usize, row: usize) -> Vec<u8> {
    (0..ROW.row_bytes())
        .map(|i| (rank * 89 + row * 7 + i) as u8)
        .collect()
}
