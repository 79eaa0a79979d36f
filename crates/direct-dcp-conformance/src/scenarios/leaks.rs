//! Rounds of building, using and dropping, after which nothing more is held than before.
//!
//! They count what their process holds, so nothing else may run in it.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::time::Duration;

use direct_dcp::{DType, Group, RowFormat};

use super::{REBUILD, basic};
use crate::Rank;
use crate::backends::GroupRank;
use crate::case::{Case, Spec};
use crate::failure::{Failure, Outcome, ensure};
use crate::probe::Probe;
use crate::usage::Usage;

/// Rounds before the first count, in which an allocator finds its size.
const WARM: u64 = 20;

/// Workspaces on a group that lives on.
pub(super) fn workspaces<R: Rank>(rank: R, case: &Case) -> Outcome {
    let mut checked = 0;
    let mut round = |round: u64| {
        let spec = Spec {
            ubatches: 2,
            // A leak of one would show: it is some pages.
            ..Spec::new(case, 16 * case.world, RowFormat::new(DType::BF16, 576))
        };
        let probe = Probe::build(&rank, spec, case.seed ^ round)?;
        probe.copied(0, 16)?;
        let lent = probe.lent(1, 16)?;
        checked += probe.checked();
        // The workspace before what it has lent, at times.
        if round.is_multiple_of(2) {
            drop(probe);
            lent.verify()?;
        }
        Ok(())
    };
    unchanged(&rank, case.amount, &mut round)?;
    Ok(checked)
}

/// Groups that replace one another, and groups that meet in a directory.
pub(super) fn rebuilds<R: Rank>(rank: R, case: &Case) -> Outcome {
    let mut checked = 0;
    let dir = shared_directory(&rank)?;
    let mut round = |round: u64| {
        let patience = Duration::from_secs(30);
        let group = Group::directory(&dir, rank.rank(), rank.world_size(), patience)?;
        let first = GroupRank(group);
        checked += basic::one_gather(GroupRank(first.0.clone()), case)?;
        let second = first.rebuild(REBUILD)?;
        if round.is_multiple_of(2) {
            drop(first);
        }
        checked += basic::one_gather(second, case)?;
        Ok(())
    };
    let result = unchanged(&rank, case.amount, &mut round);
    if rank.rank() == 0 {
        // Empty by now; a failure says so itself.
        let _ = std::fs::remove_dir_all(&dir);
    }
    result?;
    Ok(checked)
}

/// A directory that rank 0 makes, for its user only.
fn shared_directory<R: Rank>(rank: &R) -> Result<PathBuf, Failure> {
    let mut path = String::new();
    if rank.rank() == 0 {
        let dir = tempfile::Builder::new()
            .permissions(Permissions::from_mode(0o700))
            .tempdir()
            .map_err(|error| format!("no directory: {error}"))?;
        path = dir.keep().display().to_string();
    }
    let paths = rank.exchange(path.as_bytes())?;
    Ok(PathBuf::from(
        String::from_utf8_lossy(&paths[0]).into_owned(),
    ))
}

fn unchanged<R: Rank>(
    rank: &R,
    rounds: u64,
    round: &mut dyn FnMut(u64) -> Result<(), Failure>,
) -> Result<(), Failure> {
    (0..WARM).try_for_each(&mut *round)?;
    let before = in_turn(rank, Usage::steady)?;
    (WARM..WARM + rounds).try_for_each(round)?;
    let after = in_turn(rank, || Usage::settled(&before))?;
    ensure(after.is_as(&before), || {
        format!("{before:?} became {after:?} in {rounds} rounds")
    })
}

/// Where ranks are threads all count the same, and a count is itself something that is open.
fn in_turn<R: Rank>(rank: &R, count: impl Fn() -> Usage) -> Result<Usage, Failure> {
    let mut usage = None;
    rank.meet()?;
    for turn in 0..rank.world_size() {
        if turn == rank.rank() {
            usage = Some(count());
        }
        rank.meet()?;
    }
    usage.ok_or_else(|| Failure("a rank beyond the world".into()))
}
