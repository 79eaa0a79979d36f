//! Row maps: where the rows of one rank go. And the slots where they are.

use direct_dcp::Pages;
use direct_dcp::plan::{self, Run};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::{errors, memory};

/// For every row that one rank contributes to a gather, its place in the result, or that it is
/// padding.
#[pyclass(frozen, eq, hash, module = "direct_dcp.plan")]
#[derive(PartialEq, Eq, Hash)]
pub(crate) struct RowMap(pub(crate) plan::RowMap);

#[pymethods]
impl RowMap {
    /// The map of ``rank`` for a gather of several requests: the result holds request after
    /// request, and of each the valid rows of rank after rank.
    ///
    /// Of request i every rank contributes ``padded[i]`` rows from row ``local_start[i]`` of its
    /// shard on; the shard of rank r has ``lens[i][r]`` rows, and what is behind them is padding.
    /// Raises InvalidArgument for lists that differ in length, and for a rank that is none of the
    /// group's.
    #[staticmethod]
    fn for_requests(
        padded: &Bound<'_, PyAny>,
        lens: &Bound<'_, PyAny>,
        local_start: &Bound<'_, PyAny>,
        rank: &Bound<'_, PyAny>,
    ) -> PyResult<Self> {
        let padded = errors::counts("padded", padded)?;
        let lens: Vec<Vec<usize>> = lens
            .try_iter()?
            .map(|lens| errors::counts("lens", &lens?))
            .collect::<PyResult<_>>()?;
        let starts = errors::counts("local_start", local_start)?;
        let rank = errors::count("rank", rank)?;
        made(plan::RowMap::for_requests(&padded, &lens, &starts, rank))
    }

    /// The map of ``rank`` for a gather of ``counts[r]`` rows from each rank r, in rank order,
    /// without padding. A count may be 0.
    #[staticmethod]
    fn uneven(counts: &Bound<'_, PyAny>, rank: &Bound<'_, PyAny>) -> PyResult<Self> {
        let counts = errors::counts("counts", counts)?;
        made(plan::RowMap::uneven(&counts, errors::count("rank", rank)?))
    }

    /// The map that sends local row i to row ``dst_rows[i]`` of a result of ``total_rows`` rows, or
    /// nowhere if that is -1. An array of 32-bit integers is read as it is.
    ///
    /// Raises InvalidArgument for rows that are out of range, or twice there.
    #[staticmethod]
    fn from_rows(dst_rows: &Bound<'_, PyAny>, total_rows: &Bound<'_, PyAny>) -> PyResult<Self> {
        // What is no signed number is one too large, and not a negative one.
        let rows = words("dst_rows", dst_rows, "i")?;
        let rows: Vec<i32> = rows.into_iter().map(u32::cast_signed).collect();
        let total_rows = errors::count("total_rows", total_rows)?;
        made(plan::RowMap::from_rows(&rows, total_rows))
    }

    /// The map of these runs of neighbouring rows, ``(src, dst, len)``, in any order; local rows
    /// that are in none are padding.
    ///
    /// Raises InvalidArgument for runs that share a row, or pass the last one.
    #[staticmethod]
    fn from_runs(
        runs: &Bound<'_, PyAny>,
        local_rows: &Bound<'_, PyAny>,
        total_rows: &Bound<'_, PyAny>,
    ) -> PyResult<Self> {
        let run = |run: PyResult<Bound<'_, PyAny>>| match errors::counts("runs", &run?)?[..] {
            [src, dst, len] => Ok(Run { src, dst, len }),
            _ => Err(errors::invalid("runs: expected (src, dst, len) of each")),
        };
        let runs = runs.try_iter()?.map(run).collect::<PyResult<_>>()?;
        let local_rows = errors::count("local_rows", local_rows)?;
        let total_rows = errors::count("total_rows", total_rows)?;
        made(plan::RowMap::from_runs(runs, local_rows, total_rows))
    }

    /// The same map, with the digest of whatever the maps of all ranks were made from.
    fn with_digest(&self, digest: &Bound<'_, PyAny>) -> PyResult<Self> {
        let digest = errors::count("digest", digest)? as u64;
        Ok(RowMap(self.0.clone().with_digest(digest)))
    }

    /// Checks that the maps of a group, in rank order, deliver every row of a result once.
    /// ``request_rows`` are the rows of each request in it, in order.
    ///
    /// Raises InvalidArgument, which names the request and the row.
    #[staticmethod]
    fn check_group(maps: Vec<PyRef<'_, RowMap>>, request_rows: &Bound<'_, PyAny>) -> PyResult<()> {
        let maps: Vec<plan::RowMap> = maps.iter().map(|map| map.0.clone()).collect();
        let rows = errors::counts("request_rows", request_rows)?;
        plan::RowMap::check_group(&maps, &rows).map_err(errors::plan)
    }

    /// For every local row its row in the result, or -1 for padding: an array.array of 32-bit
    /// integers.
    #[getter]
    fn dst_rows<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let rows = self.0.dst_rows();
        array(py, "i", rows.into_iter().flat_map(i32::to_ne_bytes))
    }

    /// The runs, in ascending order of local rows.
    #[getter]
    fn runs<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyAny>>> {
        let make = in_plan(py, "Run")?;
        let runs = self.0.runs().iter();
        runs.map(|run| make.call1((run.src, run.dst, run.len)))
            .collect()
    }

    /// T, the rows that this rank contributes, padding included.
    #[getter]
    fn local_rows(&self) -> usize {
        self.0.local_rows()
    }

    /// Rows of the result, over all ranks.
    #[getter]
    fn total_rows(&self) -> usize {
        self.0.total_rows()
    }

    /// A fingerprint of what the maps of all ranks were made from, 64 bits.
    #[getter]
    fn digest(&self) -> u64 {
        self.0.digest()
    }
}

/// The slots of rows ``start`` to ``stop`` of a request, whose pages of ``block`` rows, in order,
/// are those of ``block_table``: an array.array of unsigned 32-bit integers.
///
/// Raises InvalidArgument where the table ends before the rows do.
#[pyfunction]
pub(crate) fn slots<'py>(
    block_table: &Bound<'py, PyAny>,
    block: &Bound<'py, PyAny>,
    start: &Bound<'py, PyAny>,
    stop: &Bound<'py, PyAny>,
) -> PyResult<Bound<'py, PyAny>> {
    let table = words("block_table", block_table, "iI")?;
    // Strides are of no interest here.
    let pages = Pages::dense(errors::count("block", block)?, 0);
    let rows = errors::count("start", start)?..errors::count("stop", stop)?;
    let slots = pages.slots(&table, rows).map_err(errors::plan)?;
    array(
        block_table.py(),
        "I",
        slots.into_iter().flat_map(u32::to_ne_bytes),
    )
}

fn made(map: Result<plan::RowMap, plan::PlanError>) -> PyResult<RowMap> {
    map.map(RowMap).map_err(errors::plan)
}

/// A class of the package's module `plan`.
pub(crate) fn in_plan<'py>(py: Python<'py>, class: &str) -> PyResult<Bound<'py, PyAny>> {
    py.import("direct_dcp.plan")?.getattr(class)
}

/// Whole numbers of 32 bits that Python has in a list or an array, in arrays of these type codes as
/// they are.
fn words(what: &str, values: &Bound<'_, PyAny>, codes: &str) -> PyResult<Vec<u32>> {
    let rows = values.py().import("direct_dcp._rows")?;
    let bytes = rows.call_method1("words", (what, values, codes))?;
    Ok(memory::words(bytes.extract()?))
}

fn array<'py>(
    py: Python<'py>,
    code: &str,
    bytes: impl Iterator<Item = u8>,
) -> PyResult<Bound<'py, PyAny>> {
    let bytes: Vec<u8> = bytes.collect();
    let array = py.import("array")?.getattr("array")?;
    array.call1((code, PyBytes::new(py, &bytes)))
}
