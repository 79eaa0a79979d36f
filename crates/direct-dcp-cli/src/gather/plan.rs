//! What is gathered in final layout: requests, cut into chunks, split into planes.

use crate::args;
use crate::error::Error;
use crate::ranks::{self, WayChoice};
use direct_dcp::plan::{Chunk, ChunkPlan, ChunkPlanner, Sharding};
use direct_dcp::{FinalLayout, RowFormat};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use std::fmt;

/// In which order rows arrive.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Layout {
    /// The shard of rank after rank, padding included.
    RankMajor,
    /// The tokens of request after request, inside a request rank by rank.
    RequestMajor,
}

/// In which order rows arrive, and what that depends on.
#[derive(Debug, clap::Args)]
pub(super) struct Options {
    /// In which order rows arrive
    #[arg(long, value_enum, default_value_t = Layout::RankMajor)]
    pub(super) layout: Layout,
    /// Request-major: the rows of each request; the requests follow one another in the tensor
    /// [default: one request of all rows]
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    requests: Vec<usize>,
    /// Request-major: rows of one gather over all ranks, padding included, at most; rounded up to
    /// whole rounds and pages [default: one gather of all rows]
    #[arg(long, value_name = "N", value_parser = args::positive)]
    chunk_rows: Option<usize>,
    /// Request-major: elements of each plane into which rows are split [default: one plane]
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = args::positive)]
    planes: Vec<usize>,
    /// Request-major: each rank's rows are in a cache of pages of BLOCK rows, in no order
    /// [default: one behind the other]
    #[arg(long, value_name = "BLOCK", value_parser = args::positive)]
    paged: Option<usize>,
}

impl Options {
    /// Refuses what does not go together.
    pub(super) fn check(&self, way: WayChoice) -> Result<(), Error> {
        let fail = |why: String| Err(Error::Usage(why));
        if self.layout == Layout::RankMajor {
            let given = [
                ("--requests", !self.requests.is_empty()),
                ("--chunk-rows", self.chunk_rows.is_some()),
                ("--planes", !self.planes.is_empty()),
                ("--paged", self.paged.is_some()),
            ];
            return match given.iter().find(|(_, given)| *given) {
                Some((name, _)) => fail(format!("{name} is for --layout request-major")),
                None => Ok(()),
            };
        }
        ranks::check_final(&[way], self.paged.is_some())
    }

    /// The plan for a tensor of `rows` rows of `dim` elements, unless its rows are gathered rank by
    /// rank.
    pub(super) fn plan(&self, rows: usize, dim: usize) -> Result<Option<Plan>, Error> {
        if self.layout == Layout::RankMajor {
            return Ok(None);
        }
        let fail = |why: String| Err(Error::Failed(why));
        if i32::try_from(rows).is_err() {
            return fail(format!(
                "--layout request-major is for tensors of at most {} rows",
                i32::MAX
            ));
        }
        let or = |list: &[usize], all| match list {
            [] => vec![all],
            list => list.to_vec(),
        };
        let plan = Plan {
            requests: or(&self.requests, rows),
            chunk_rows: self.chunk_rows,
            planes: or(&self.planes, dim),
            paged: self.paged,
        };
        let mut lens = plan.requests.iter();
        let sum = lens.try_fold(0_usize, |sum, &len| sum.checked_add(len));
        match sum {
            Some(sum) if sum == rows => Ok(Some(plan)),
            Some(sum) => fail(format!(
                "--requests add up to {sum} rows, and the tensor has {rows}"
            )),
            None => fail("--requests add up to more rows than can be counted".into()),
        }
    }
}

/// What is gathered, and how.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Plan {
    pub(super) requests: Vec<usize>,
    pub(super) chunk_rows: Option<usize>,
    pub(super) planes: Vec<usize>,
    pub(super) paged: Option<usize>,
}

impl Plan {
    /// The rows of a rank: those that hold tokens, and all that travel.
    pub(super) fn rows(&self, sharding: Sharding, rank: usize) -> (usize, usize) {
        let lens = || self.requests.iter();
        (
            lens().map(|&len| sharding.local_len(len, rank)).sum(),
            lens().map(|&len| sharding.padded_rows(len)).sum(),
        )
    }

    /// The gathers.
    pub(super) fn chunks(&self, sharding: Sharding) -> Result<ChunkPlan, String> {
        let (_, padded) = self.rows(sharding, 0);
        let all = padded.saturating_mul(sharding.world_size());
        let budget = self.chunk_rows.map_or(all, |rows| rows.min(all));
        ChunkPlanner::new(sharding, self.paged.unwrap_or(1), budget)
            .and_then(|planner| planner.plan(&self.requests))
            .map_err(|error| error.to_string())
    }

    /// What the plan comes to; an error if rows of `format` cannot be gathered by it.
    pub(super) fn describe(
        &self,
        sharding: Sharding,
        format: RowFormat,
    ) -> Result<Description, String> {
        let chunks = self.chunks(sharding)?;
        // The others differ from the first in their numbers of rows.
        for chunk in chunks.chunks().iter().take(1) {
            chunk
                .row_map(0)
                .and_then(|map| FinalLayout::new(&map, format, &self.planes))
                .map_err(|error| error.to_string())?;
        }
        let (_, padded) = self.rows(sharding, 0);
        let rows: usize = self.requests.iter().sum();
        Ok(Description {
            requests: self.requests.clone(),
            chunks: chunks.chunks().len(),
            chunk_rows: Plan::capacity(&chunks, sharding),
            planes: self.planes.clone(),
            paged: self.paged,
            padding_rows: padded * sharding.world_size() - rows,
        })
    }

    /// Rows of the largest gather over all ranks, padding included.
    pub(super) fn capacity(chunks: &ChunkPlan, sharding: Sharding) -> usize {
        let rows = chunks.chunks().iter().map(Chunk::local_rows);
        rows.max().unwrap_or_default() * sharding.world_size()
    }

    /// Rows of each rank's cache; none if it cannot be counted.
    pub(super) fn cache_rows(&self, sharding: Sharding) -> Option<usize> {
        let Some(block) = self.paged else {
            return Some(self.rows(sharding, 0).1);
        };
        // The first rank has the most.
        let pages = |&len: &usize| sharding.local_len(len, 0).div_ceil(block);
        let pages: usize = self.requests.iter().map(pages).sum();
        pages.checked_mul(block)
    }
}

/// What is printed of a plan.
#[derive(Debug, Serialize)]
pub(super) struct Description {
    requests: Vec<usize>,
    chunks: usize,
    /// Rows of the largest chunk over all ranks, padding included.
    chunk_rows: usize,
    planes: Vec<usize>,
    paged: Option<usize>,
    /// Rows over all ranks that hold no tokens, and are not stored.
    padding_rows: usize,
}

impl Description {
    pub(super) fn fields(&self) -> Map<String, Value> {
        match json!(self) {
            Value::Object(fields) => fields,
            _ => Map::new(),
        }
    }
}

impl fmt::Display for Description {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let planes: Vec<String> = self.planes.iter().map(usize::to_string).collect();
        write!(
            f,
            "request-major: {} requests, {} chunks of up to {} rows, planes of {}, {}, {} rows of \
             padding left out",
            self.requests.len(),
            self.chunks,
            self.chunk_rows,
            planes.join(" + "),
            match self.paged {
                Some(block) => format!("pages of {block} rows"),
                None => "dense rows".into(),
            },
            self.padding_rows,
        )
    }
}
