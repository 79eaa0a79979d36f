//! Gathers rank by rank, with padding, on CPUs.

use super::pieces::Pieces;
use super::task::{Gathered, JUNK, POISON, Task};
use crate::ranks::{Emit, Message, RankError};
use direct_dcp::plan::Sharding;
use direct_dcp::{Group, KvGather, Workspace};
use std::time::Instant;

/// Bytes of restored rows that are passed on at a time.
const CHUNK: usize = 4 << 20;

impl Task {
    pub(super) fn rank_major(
        &self,
        group: &Group,
        sharding: Sharding,
        local: &[u8],
    ) -> Result<Gathered, RankError> {
        let ranks = group.world_size();
        let options = self.options(ranks * self.padded_rows(sharding));
        let gather = KvGather::new(Workspace::new(group, options)?);

        let mut out = vec![POISON; ranks * local.len()];
        gather.gather_into(0, local, &mut out)?;
        self.verify(sharding, &out, "copy-out")?;
        out.fill(POISON);
        let mut copy_out = Vec::with_capacity(self.iterations);
        group.barrier()?;
        for _ in 0..self.iterations {
            let start = Instant::now();
            gather.gather_into(0, local, &mut out)?;
            copy_out.push(start.elapsed().as_secs_f64() * 1e6);
        }
        self.verify(sharding, &out, "copy-out")?;

        self.verify(sharding, &gather.gather(0, local)?, "zero-copy")?;
        let mut zero_copy = Vec::with_capacity(self.iterations);
        group.barrier()?;
        for i in 1..=self.iterations {
            let start = Instant::now();
            let rows = gather.gather(0, local)?;
            zero_copy.push(start.elapsed().as_secs_f64() * 1e6);
            if i == self.iterations {
                self.verify(sharding, &rows, "zero-copy")?;
            }
        }
        Ok(Gathered {
            way: gather.workspace().way().to_string(),
            times: vec![("copy_out", copy_out), ("zero_copy", zero_copy)],
            rows: out,
        })
    }

    /// The rows of `rank`, from the file, and junk behind them.
    pub(super) fn shard(&self, sharding: Sharding, rank: usize) -> Result<Vec<u8>, String> {
        let row_bytes = self.source.row_bytes();
        let mut local = vec![JUNK; self.padded_rows(sharding) * row_bytes];
        let mut runs = Pieces::new(sharding.runs(self.source.rows()));
        self.source.each_chunk(|token, chunk| {
            for piece in runs.within(token, chunk.len() / row_bytes) {
                if piece.rank == rank {
                    let from = &chunk[(piece.token - token) * row_bytes..][..piece.len * row_bytes];
                    local[piece.row * row_bytes..][..from.len()].copy_from_slice(from);
                }
            }
            Ok::<_, String>(())
        })?;
        Ok(local)
    }

    /// Compares gathered rows with the file.
    pub(super) fn verify(
        &self,
        sharding: Sharding,
        gathered: &[u8],
        mode: &str,
    ) -> Result<(), String> {
        let row_bytes = self.source.row_bytes();
        let shard_bytes = self.padded_rows(sharding) * row_bytes;
        let mut runs = Pieces::new(sharding.runs(self.source.rows()));
        self.source.each_chunk(|token, chunk| {
            for piece in runs.within(token, chunk.len() / row_bytes) {
                let expected = &chunk[(piece.token - token) * row_bytes..][..piece.len * row_bytes];
                let start = piece.rank * shard_bytes + piece.row * row_bytes;
                let found = &gathered[start..][..expected.len()];
                if found != expected {
                    let at = found.iter().zip(expected).position(|(a, b)| a != b);
                    let at = at.unwrap_or_default();
                    return Err(format!(
                        "wrong bytes after a {mode} gather: token {}, from rank {}, is {:#04x} at \
                         byte {} where the file has {:#04x}",
                        piece.token + at / row_bytes,
                        piece.rank,
                        found[at],
                        at % row_bytes,
                        expected[at]
                    ));
                }
            }
            Ok(())
        })
    }

    /// Passes on gathered rows in token order.
    pub(super) fn restore(
        &self,
        sharding: Sharding,
        gathered: &[u8],
        emit: &mut Emit<'_>,
    ) -> Result<(), RankError> {
        let row_bytes = self.source.row_bytes();
        let shard_bytes = self.padded_rows(sharding) * row_bytes;
        let mut chunk = Vec::new();
        for run in sharding.runs(self.source.rows()) {
            let start = run.rank * shard_bytes + run.row * row_bytes;
            // A run may be as long as the file.
            for piece in gathered[start..][..run.len * row_bytes].chunks(CHUNK) {
                chunk.extend_from_slice(piece);
                if chunk.len() >= CHUNK {
                    emit(Message::Bytes(std::mem::take(&mut chunk)))?;
                }
            }
        }
        if !chunk.is_empty() {
            emit(Message::Bytes(chunk))?;
        }
        Ok(())
    }
}
