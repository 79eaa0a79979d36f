//! What to gather: who owns which token, and in which chunks contexts are gathered.

use direct_dcp::plan;
use pyo3::prelude::*;

use crate::group::Group;
use crate::row_map::{RowMap, in_plan};
use crate::{errors, signals};

/// How the tokens of a sequence are dealt to ranks: in runs of ``interleave``, so that token t
/// belongs to rank ``t // interleave % world_size``.
///
/// A rank's shard holds its tokens in ascending order. Raises InvalidArgument for fewer than two
/// ranks, and for an interleave of zero.
#[pyclass(frozen, eq, hash, module = "direct_dcp.plan")]
#[derive(PartialEq, Eq, Hash)]
pub(crate) struct Sharding(plan::Sharding);

#[pymethods]
impl Sharding {
    #[new]
    #[pyo3(signature = (world_size, interleave = None), text_signature = "(world_size, interleave=1)")]
    fn new(world_size: &Bound<'_, PyAny>, interleave: Option<&Bound<'_, PyAny>>) -> PyResult<Self> {
        let world_size = errors::count("world_size", world_size)?;
        let interleave = interleave.map(|tokens| errors::count("interleave", tokens));
        plan::Sharding::new(world_size, interleave.transpose()?.unwrap_or(1))
            .map(Sharding)
            .map_err(errors::plan)
    }

    /// The number of ranks.
    #[getter]
    fn world_size(&self) -> usize {
        self.0.world_size()
    }

    /// How many neighbouring tokens go to one rank.
    #[getter]
    fn interleave(&self) -> usize {
        self.0.interleave()
    }

    /// Tokens of one round, in which every rank gets a run.
    #[getter]
    fn round(&self) -> usize {
        self.0.round()
    }

    /// The rank that holds ``token``.
    fn owner(&self, token: &Bound<'_, PyAny>) -> PyResult<usize> {
        Ok(self.0.owner(errors::count("token", token)?))
    }

    /// The row of ``token`` in its owner's shard.
    fn local_row(&self, token: &Bound<'_, PyAny>) -> PyResult<usize> {
        Ok(self.0.local_row(errors::count("token", token)?))
    }

    /// How many of the first ``tokens`` tokens ``rank`` holds; 0 for a rank that is none of the
    /// group's.
    fn local_len(&self, tokens: &Bound<'_, PyAny>, rank: &Bound<'_, PyAny>) -> PyResult<usize> {
        let tokens = errors::count("tokens", tokens)?;
        Ok(self.0.local_len(tokens, errors::count("rank", rank)?))
    }

    /// Rows of every rank's shard of ``tokens`` tokens, padding included.
    fn padded_rows(&self, tokens: &Bound<'_, PyAny>) -> PyResult<usize> {
        Ok(self.0.padded_rows(errors::count("tokens", tokens)?))
    }

    /// The runs of the first ``tokens`` tokens, in order.
    fn runs<'py>(&self, tokens: &Bound<'py, PyAny>) -> PyResult<Vec<Bound<'py, PyAny>>> {
        let make = in_plan(tokens.py(), "TokenRun")?;
        let runs = self.0.runs(errors::count("tokens", tokens)?);
        runs.map(|run| make.call1((run.token, run.rank, run.row, run.len)))
            .collect()
    }

    fn __repr__(&self) -> String {
        let (world_size, interleave) = (self.0.world_size(), self.0.interleave());
        format!("Sharding(world_size={world_size}, interleave={interleave})")
    }
}

/// Cuts the contexts of requests into chunks, each of which one gather delivers: at most ``rows``
/// rows over all ranks, padding included, rounded up to a multiple of ``alignment``, which is the
/// least common multiple of ``block``, the tokens of a cache page, and of the sharding's round.
///
/// Requests are taken in order, and their contexts cut only at multiples of ``alignment``. Raises
/// InvalidArgument for zeros, and for more than 2**31 - 1 rows.
#[pyclass(frozen, eq, hash, module = "direct_dcp.plan")]
#[derive(PartialEq, Eq, Hash)]
pub(crate) struct ChunkPlanner(plan::ChunkPlanner);

#[pymethods]
impl ChunkPlanner {
    #[new]
    fn new(
        sharding: &Sharding,
        block: &Bound<'_, PyAny>,
        rows: &Bound<'_, PyAny>,
    ) -> PyResult<Self> {
        let block = errors::count("block", block)?;
        plan::ChunkPlanner::new(sharding.0, block, errors::count("rows", rows)?)
            .map(ChunkPlanner)
            .map_err(errors::plan)
    }

    /// Chunks as large as a model's longest context and number of sequences are worth:
    /// ``max(8 * max_model_len, 4 * max_num_seqs * block)`` rows, but no more than 65,536.
    #[staticmethod]
    fn for_model(
        sharding: &Sharding,
        block: &Bound<'_, PyAny>,
        max_model_len: &Bound<'_, PyAny>,
        max_num_seqs: &Bound<'_, PyAny>,
    ) -> PyResult<Self> {
        let block = errors::count("block", block)?;
        let len = errors::count("max_model_len", max_model_len)?;
        let seqs = errors::count("max_num_seqs", max_num_seqs)?;
        plan::ChunkPlanner::for_model(sharding.0, block, len, seqs)
            .map(ChunkPlanner)
            .map_err(errors::plan)
    }

    /// How tokens are dealt to the ranks.
    #[getter]
    fn sharding(&self) -> Sharding {
        Sharding(self.0.sharding())
    }

    /// Tokens; contexts are cut at multiples of it.
    #[getter]
    fn alignment(&self) -> usize {
        self.0.alignment()
    }

    /// Rows over all ranks that a chunk has at most: the capacity that its workspace needs.
    #[getter]
    fn budget_rows(&self) -> usize {
        self.0.budget_rows()
    }

    /// The chunks of requests with these contexts, in tokens. A context of 0 is in no chunk.
    ///
    /// Raises InvalidArgument for a context of more than 2**31 - 1 tokens.
    fn plan(&self, py: Python<'_>, contexts: &Bound<'_, PyAny>) -> PyResult<ChunkPlan> {
        let contexts = errors::counts("contexts", contexts)?;
        py.detach(|| self.0.plan(&contexts))
            .map(ChunkPlan)
            .map_err(errors::plan)
    }
}

/// All chunks of a list of requests.
#[pyclass(frozen, eq, module = "direct_dcp.plan")]
#[derive(PartialEq, Eq)]
pub(crate) struct ChunkPlan(plan::ChunkPlan);

#[pymethods]
impl ChunkPlan {
    /// The chunks, in the order in which all ranks gather them.
    #[getter]
    fn chunks(&self) -> Vec<Chunk> {
        self.0.chunks().iter().cloned().map(Chunk).collect()
    }

    /// A fingerprint of the whole plan, 64 bits. Ranks whose plans have the same one gather the
    /// same chunks.
    #[getter]
    fn digest(&self) -> u64 {
        self.0.digest()
    }

    /// A fingerprint of each request's share of the plan, 64 bits.
    #[getter]
    fn request_digests(&self) -> Vec<u64> {
        self.0.request_digests().as_slice().to_vec()
    }

    /// Collective: compares the plans of all ranks, request by request.
    ///
    /// Raises Mismatch, which names a rank and a request, on every rank whose plan is not that of
    /// all others; and what ``Group.all_gather`` does.
    fn agree(&self, py: Python<'_>, group: &Group) -> PyResult<()> {
        let group = &group.inner;
        let abort = group.abort_handle();
        signals::aborting(py, &abort, || self.0.agree(group))?.map_err(errors::agreement)
    }
}

/// What one gather delivers: parts of one or more requests, in their order.
#[pyclass(frozen, eq, hash, module = "direct_dcp.plan")]
#[derive(PartialEq, Eq, Hash)]
pub(crate) struct Chunk(plan::Chunk);

#[pymethods]
impl Chunk {
    /// The requests that take part, each once, in ascending order.
    #[getter]
    fn parts(&self) -> Vec<Part> {
        self.0.parts().iter().copied().map(Part).collect()
    }

    /// T, the rows that every rank contributes, padding included.
    #[getter]
    fn local_rows(&self) -> usize {
        self.0.local_rows()
    }

    /// Rows of the result in its final layout, which has no padding: one per token.
    #[getter]
    fn total_rows(&self) -> usize {
        self.0.total_rows()
    }

    /// A fingerprint, equal on all ranks for equal chunks, 64 bits.
    #[getter]
    fn digest(&self) -> u64 {
        self.0.digest()
    }

    /// Where the rows of ``rank`` belong: request by request, and inside a request rank by rank.
    ///
    /// Raises InvalidArgument for a rank that is none of the group's.
    fn row_map(&self, rank: &Bound<'_, PyAny>) -> PyResult<RowMap> {
        let map = self.0.row_map(errors::count("rank", rank)?);
        map.map(RowMap).map_err(errors::plan)
    }
}

/// The share of one request in a chunk: tokens ``start`` to ``start + len`` of its context.
#[pyclass(frozen, eq, hash, module = "direct_dcp.plan")]
#[derive(PartialEq, Eq, Hash)]
pub(crate) struct Part(plan::Part);

#[pymethods]
impl Part {
    /// The request, counted from 0 in the list that was planned.
    #[getter]
    fn request(&self) -> usize {
        self.0.request
    }

    /// The first token: a multiple of the planner's alignment.
    #[getter]
    fn start(&self) -> usize {
        self.0.start
    }

    /// Tokens, at least one.
    #[getter]
    fn len(&self) -> usize {
        self.0.len
    }

    /// The row of every rank's shard of the request from which its rows are taken.
    #[getter]
    fn local_start(&self) -> usize {
        self.0.local_start
    }

    /// Rows that every rank takes from there, padding included.
    #[getter]
    fn padded_len(&self) -> usize {
        self.0.padded_len
    }

    /// How many of the rows of ``rank`` hold tokens; the others, behind them, are padding.
    fn valid_rows(&self, rank: &Bound<'_, PyAny>) -> PyResult<usize> {
        Ok(self.0.valid_rows(errors::count("rank", rank)?))
    }

    fn __repr__(&self) -> String {
        let (request, start, len) = (self.0.request, self.0.start, self.0.len);
        format!("Part(request={request}, start={start}, len={len})")
    }
}
