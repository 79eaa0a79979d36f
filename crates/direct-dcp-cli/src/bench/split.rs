//! What gathers in final layout deliver in a benchmark: a few requests, split into planes.

use crate::args;
use crate::error::Error;
use crate::ranks::{self, Backend, WayChoice};
use direct_dcp::plan::{Chunk, ChunkPlanner, RowMap, Sharding};
use direct_dcp::{DType, FinalLayout, RowFormat};
use serde::{Deserialize, Serialize};
use std::fmt;

/// In which order rows arrive.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum Layout {
    /// The rows of rank after rank.
    RankMajor,
    /// The tokens of request after request, without padding, split into planes.
    RequestMajor,
}

/// What gathers in final layout deliver.
#[derive(Debug, clap::Args)]
pub(super) struct LayoutOptions {
    /// In which order rows arrive
    #[arg(long, value_enum, default_value_t = Layout::RankMajor)]
    pub(super) layout: Layout,
    /// Request-major: how many requests share the rows, unevenly [default: 8]
    #[arg(long, value_name = "N", value_parser = args::positive)]
    requests: Option<usize>,
    /// Request-major: bytes of each plane into which rows are split [default: one plane]
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = args::positive)]
    planes: Vec<usize>,
}

impl LayoutOptions {
    /// What gathers deliver, if it is their final layout that is measured.
    pub(super) fn split(
        &self,
        backend: Backend,
        ways: &[WayChoice],
        blocks: Option<usize>,
        row_bytes: usize,
    ) -> Result<Option<Split>, Error> {
        let fail = |why: &str| Err(Error::Usage(why.into()));
        if self.layout == Layout::RankMajor {
            return match (self.requests, &self.planes[..]) {
                (None, []) => Ok(None),
                (Some(_), _) => fail("--requests is for --layout request-major"),
                (None, _) => fail("--planes is for --layout request-major"),
            };
        }
        ranks::check_final(ways, false)?;
        if !backend.on_gpus() && blocks.is_some_and(|blocks| blocks > 1) {
            return fail(
                "--blocks is 1 for --layout request-major on CPUs, where the pass over the rows has \
                 one thread",
            );
        }
        let planes = match &self.planes[..] {
            [] => vec![row_bytes],
            planes => planes.to_vec(),
        };
        // Any rows say whether they can be split so.
        RowMap::uneven(&[1], 0)
            .and_then(|map| {
                FinalLayout::new(&map, RowFormat::new(DType::Bytes, row_bytes), &planes)
            })
            .map_err(|error| Error::Usage(error.to_string()))?;
        Ok(Some(Split {
            requests: self.requests.unwrap_or(8),
            planes,
        }))
    }
}

/// How many requests, and how their rows are split.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Split {
    pub(super) requests: usize,
    pub(super) planes: Vec<usize>,
}

impl Split {
    /// The gather of `rows` rows of each rank: of request i of n, i + 1 of n(n + 1)/2 shares of
    /// them, and in its last round a single token. Requests that come to no row are left out.
    pub(super) fn chunk(&self, rows: usize, sharding: Sharding) -> Result<Chunk, String> {
        let ranks = sharding.world_size();
        // More requests than rows would have to share a row.
        let shares = self.requests.min(rows) as u128;
        let end = |i: u128| (rows as u128 * (i * (i + 1)) / (shares * (shares + 1))) as usize;
        let lens = (1..=shares).map(|i| end(i) - end(i - 1));
        let contexts: Vec<usize> = lens
            .filter(|&rows| rows > 0)
            .map(|rows| (rows - 1) * ranks + 1)
            .collect();
        let chunks = ChunkPlanner::new(sharding, 1, rows * ranks)
            .and_then(|planner| planner.plan(&contexts))
            .map_err(|error| error.to_string())?;
        let first = chunks.chunks().first().cloned();
        first.ok_or_else(|| "there is nothing to gather".into())
    }
}

impl fmt::Display for Split {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let planes: Vec<String> = self.planes.iter().map(usize::to_string).collect();
        let planes = planes.join(" + ");
        write!(
            f,
            "up to {} requests, each with a single token in its last round; planes of {planes} bytes",
            self.requests
        )
    }
}
