//! A rank of the library's own group, whose ranks are threads or processes.

use std::borrow::Cow;
use std::ops::Range;
use std::time::Duration;

use direct_dcp::{
    GatherError, Gathered, Group, GroupError, KvGather, Status, Workspace, WorkspaceError,
};

use crate::case::Spec;
use crate::{Gather, Rank, Rows};

/// A rank on the CPU.
#[derive(Debug)]
pub struct GroupRank(pub Group);

impl Rank for GroupRank {
    type Gather = KvGather;

    fn rank(&self) -> usize {
        self.0.rank()
    }

    fn world_size(&self) -> usize {
        self.0.world_size()
    }

    fn previous_ranks(&self) -> &[usize] {
        self.0.previous_ranks()
    }

    fn build(&self, spec: &Spec) -> Result<KvGather, WorkspaceError> {
        let workspace = Workspace::new(&self.0, spec.options())?;
        let gather = KvGather::new(workspace);
        Ok(gather.timeout(spec.timeout).first_timeout(spec.timeout))
    }

    fn exchange(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>, GroupError> {
        self.0.all_gather(bytes)
    }

    fn aborter(&self) -> Box<dyn Fn() + Send> {
        let handle = self.0.abort_handle();
        Box::new(move || handle.abort())
    }

    fn rebuild(&self, deadline: Duration) -> Result<Self, GroupError> {
        self.0.rebuild(deadline).map(GroupRank)
    }
}

impl Gather for KvGather {
    type Rows = Gathered;

    fn gather_into(
        &self,
        ubatch: usize,
        storage: &mut [u8],
        local: Range<usize>,
        out: Range<usize>,
    ) -> Result<(), GatherError> {
        if local.start < out.start {
            let (head, tail) = storage.split_at_mut(out.start);
            KvGather::gather_into(self, ubatch, &head[local], &mut tail[..out.len()])
        } else {
            let (head, tail) = storage.split_at_mut(local.start);
            KvGather::gather_into(self, ubatch, &tail[..local.len()], &mut head[out])
        }
    }

    fn gather(&self, ubatch: usize, local: &[u8]) -> Result<Gathered, GatherError> {
        KvGather::gather(self, ubatch, local)
    }

    fn status(&self) -> Status {
        KvGather::status(self)
    }
}

impl Rows for Gathered {
    fn epoch(&self) -> u64 {
        Gathered::epoch(self)
    }

    fn bytes(&self) -> Cow<'_, [u8]> {
        Cow::Borrowed(self)
    }
}
