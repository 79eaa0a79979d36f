//! Losing a rank and going on without it, in the same processes.
//!
//! Run it: `cargo run --example 04-rebuild`

use direct_dcp::{DType, Group, KvGather, RowFormat, Workspace, WorkspaceOptions};
use std::error::Error;
use std::thread;
use std::time::Duration;

const RANKS: usize = 4;
const VICTIM: usize = 1;
const ROW: RowFormat = RowFormat::new(DType::F8E4M3, 576);

fn main() -> Result<(), Box<dyn Error + Send + Sync>> {
    let ranks: Vec<_> = Group::threads(RANKS)?
        .into_iter()
        .map(|group| thread::spawn(move || rank(group)))
        .collect();
    for rank in ranks {
        rank.join().map_err(|_| "a rank panicked")??;
    }
    Ok(())
}

fn rank(group: Group) -> Result<(), Box<dyn Error + Send + Sync>> {
    // A rank keeps its name, whatever its number in the group becomes.
    let name = group.rank();
    let names: Vec<usize> = (0..RANKS).collect();
    step(&group, name, &names)?;

    if name == VICTIM {
        println!("rank {name} leaves");
        return Ok(());
    }

    // Nobody hangs: the call fails and says who is missing.
    let Err(error) = step(&group, name, &names) else {
        return Err("a gather succeeded without a rank".into());
    };
    println!("rank {name}: {error}");

    // The survivors agree on a new generation, with fresh memory and new numbers.
    let group = group.rebuild(Duration::from_secs(10))?;
    let names: Vec<usize> = group
        .previous_ranks()
        .iter()
        .map(|&old| names[old])
        .collect();
    assert!(!names.contains(&VICTIM) && names[group.rank()] == name);
    step(&group, name, &names)?;
    println!(
        "rank {name} goes on as rank {} of {}",
        group.rank(),
        group.world_size()
    );
    Ok(())
}

/// One gather in a workspace of its own, in which every rank sends its name.
fn step(group: &Group, name: usize, names: &[usize]) -> Result<(), Box<dyn Error + Send + Sync>> {
    let options = WorkspaceOptions::new(16 * group.world_size(), ROW);
    let gather = KvGather::new(Workspace::new(group, options)?);
    let rows = gather.gather(0, &rows_of(name))?;
    let expected: Vec<u8> = names.iter().flat_map(|&name| rows_of(name)).collect();
    assert_eq!(&rows[..], expected);
    Ok(())
}

fn rows_of(name: usize) -> Vec<u8> {
    vec![name as u8 + 1; 16 * ROW.row_bytes()]
}
