//! Ranks as processes. This program starts itself once for every rank; an engine would start its
//! workers so, or leave it to torchrun, and the workers would not notice a difference.
//!
//! Run it: `cargo run --example 03-processes`

use direct_dcp::{DType, Group, KvGather, Launcher, RowFormat, Way, Workspace, WorkspaceOptions};
use std::env;
use std::error::Error;
use std::process::Command;

const RANKS: usize = 3;
/// A packed record: 512 values in 8 bits, 4 scales, 64 values with positions in 16 bits.
const ROW: RowFormat = RowFormat::new(DType::Bytes, 656);

fn main() -> Result<(), Box<dyn Error>> {
    // The launcher sets it for the processes that it starts.
    match env::var_os("RANK") {
        Some(_) => rank(),
        None => parent(),
    }
}

fn parent() -> Result<(), Box<dyn Error>> {
    let program = env::current_exe()?;
    let mut launcher = Launcher::new(RANKS)?;
    let mut children = Vec::new();
    for rank in 0..RANKS {
        children.push(launcher.spawn(rank, &mut Command::new(&program))?);
    }
    for (rank, child) in children.iter_mut().enumerate() {
        let status = child.wait()?;
        if !status.success() {
            return Err(format!("rank {rank}: {status}").into());
        }
    }
    println!("all {RANKS} processes are done");
    Ok(())
}

fn rank() -> Result<(), Box<dyn Error>> {
    let group = Group::from_env()?;
    let rows_of = |rank: usize| vec![rank as u8 + 1; 17 * ROW.row_bytes()];
    let expected: Vec<u8> = (0..group.world_size()).flat_map(rows_of).collect();

    // Each way of moving rows gives the same bytes. By default the group takes the shared slot.
    for way in Way::CPU {
        let options = WorkspaceOptions::new(64 * RANKS, ROW).way(way);
        let gather = KvGather::new(Workspace::new(&group, options)?);
        let rows = gather.gather(0, &rows_of(group.rank()))?;
        assert_eq!(&rows[..], expected);
    }

    // Small things that all ranks must know travel by the group itself.
    let said = group.all_gather(format!("process {}", std::process::id()).as_bytes())?;
    if group.rank() == 0 {
        for (rank, words) in said.iter().enumerate() {
            println!("rank {rank} is {}", String::from_utf8_lossy(words));
        }
    }
    Ok(())
}
