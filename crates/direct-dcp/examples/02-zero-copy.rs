//! Gathering without a copy: the rows are lent where the ranks stored them.
//!
//! Run it: `cargo run --example 02-zero-copy`

use direct_dcp::{DType, GatherError, Group, KvGather, RowFormat, Workspace, WorkspaceOptions};
use std::error::Error;
use std::thread;

const RANKS: usize = 2;
const ROW: RowFormat = RowFormat::new(DType::F16, 128);
const CHUNKS: u8 = 5;

fn main() -> Result<(), Box<dyn Error + Send + Sync>> {
    let ranks: Vec<_> = Group::threads(RANKS)?
        .into_iter()
        .map(|group| thread::spawn(move || rank(&group)))
        .collect();
    for rank in ranks {
        rank.join().map_err(|_| "a rank panicked")??;
    }
    Ok(())
}

fn rank(group: &Group) -> Result<(), Box<dyn Error + Send + Sync>> {
    // With three slots, a result stays valid while the next one is gathered.
    let options = WorkspaceOptions::new(64, ROW).slots(3);
    let gather = KvGather::new(Workspace::new(group, options)?);

    // A consumer that always looks at two chunks of context, the last and the one before.
    let mut before = gather.gather(0, &chunk(group.rank(), 0))?;
    for number in 1..CHUNKS {
        let now = gather.gather(0, &chunk(group.rank(), number))?;
        assert_eq!(&before[..], all_ranks(number - 1));
        assert_eq!(&now[..], all_ranks(number));
        // Lets go of the older one, whose slot the call after the next will use.
        before = now;
    }

    // Holding on for too long is an error that changes nothing, not a wrong result later.
    let held = gather.gather(0, &chunk(group.rank(), CHUNKS))?;
    let refused = gather.gather(0, &chunk(group.rank(), CHUNKS + 1));
    assert!(matches!(refused, Err(GatherError::SlotInUse { .. })));
    assert_eq!(&before[..], all_ranks(CHUNKS - 1));
    assert_eq!(&held[..], all_ranks(CHUNKS));
    if let Err(error) = refused {
        println!("rank {}: {error}", group.rank());
    }

    // Once it is dropped, the same call works.
    drop(before);
    let next = gather.gather(0, &chunk(group.rank(), CHUNKS + 1))?;
    assert_eq!(&next[..], all_ranks(CHUNKS + 1));
    println!(
        "rank {}: call {} delivered {} bytes",
        group.rank(),
        next.epoch(),
        next.len()
    );
    Ok(())
}

/// Eight rows of one rank.
fn chunk(rank: usize, number: u8) -> Vec<u8> {
    vec![number * 16 + rank as u8; 8 * ROW.row_bytes()]
}

fn all_ranks(number: u8) -> Vec<u8> {
    (0..RANKS).flat_map(|rank| chunk(rank, number)).collect()
}
