//! The ranks.

use std::io;
use std::sync::mpsc::{self, Receiver, Sender};

use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::{errors, signals};

/// One rank's handle to a group of ranks, which all run on one machine.
///
/// The collectives, ``all_gather`` and ``barrier``, have to be called by every rank, in the same
/// order. Every wait ends: by success, by a timeout that names the missing ranks, because a rank
/// has gone, or by an abort.
#[pyclass(frozen, module = "direct_dcp")]
pub(crate) struct Group {
    pub(crate) inner: direct_dcp::Group,
}

#[pymethods]
impl Group {
    /// A group whose ranks are threads of this process: one handle for each, in rank order.
    ///
    /// ``timeout`` is for how many seconds each collective waits for the others. Raises
    /// InvalidArgument unless there are 2 to 1,024 ranks.
    #[staticmethod]
    #[pyo3(signature = (world_size, *, timeout = 60.0))]
    fn threads(world_size: &Bound<'_, PyAny>, timeout: f64) -> PyResult<Vec<Group>> {
        let world_size = errors::count("world_size", world_size)?;
        let timeout = errors::seconds("timeout", timeout)?;
        let ranks = direct_dcp::Group::threads(world_size).map_err(errors::group)?;
        let ranks = ranks.into_iter();
        Ok(ranks
            .map(|inner| Group {
                inner: inner.with_timeout(timeout),
            })
            .collect())
    }

    /// The group that the environment describes, as torchrun sets it: RANK, WORLD_SIZE, and
    /// MASTER_ADDR and MASTER_PORT, or DIRECT_DCP_DIR.
    ///
    /// ``timeout`` is for how many seconds bring-up and each collective wait for the others; None
    /// is what DIRECT_DCP_TIMEOUT says, or 60. Raises InvalidArgument if a variable is missing or
    /// wrong, Timeout, Mismatch, and Unsupported if the ranks are on several machines.
    #[staticmethod]
    #[pyo3(signature = (*, timeout = None))]
    fn from_env(py: Python<'_>, timeout: Option<f64>) -> PyResult<Group> {
        let timeout = timeout.map(|timeout| errors::seconds("timeout", timeout));
        let timeout = timeout.transpose()?;
        let inner = signals::leaving(py, move || match timeout {
            Some(timeout) => direct_dcp::Group::from_env_timeout(timeout),
            None => direct_dcp::Group::from_env(),
        })?;
        inner.map(|inner| Group { inner }).map_err(errors::group)
    }

    /// A group over ``all_gather``, which passes bytes to every rank and returns those of all, in
    /// rank order. It is called once, on this thread.
    ///
    /// ``timeout`` is for how many seconds bring-up, once it has answered, and each collective wait
    /// for the others. Raises what ``all_gather`` does, InvalidArgument if it returns something
    /// else, Timeout, Mismatch, PeerLost, and Unsupported if the ranks are on several machines.
    #[staticmethod]
    #[pyo3(signature = (rank, world_size, all_gather, *, timeout = 60.0))]
    fn from_exchange(
        py: Python<'_>,
        rank: &Bound<'_, PyAny>,
        world_size: &Bound<'_, PyAny>,
        all_gather: Py<PyAny>,
        timeout: f64,
    ) -> PyResult<Group> {
        let rank = errors::count("rank", rank)?;
        let world_size = errors::count("world_size", world_size)?;
        let timeout = errors::seconds("timeout", timeout)?;
        let (ask, mut asked) = mpsc::channel();
        let (answer, answers) = mpsc::channel();
        let mut exchange = Exchange {
            rank,
            world_size,
            ask,
            answers,
        };
        let mut built = signals::start(move || {
            direct_dcp::Group::with_exchange_timeout(&mut exchange, timeout)
        })?;
        // On this thread, which may have a device that is current, or a lock.
        if let Some(card) = signals::receive(py, &mut asked)? {
            let all = all_gather.bind(py).call1((PyBytes::new(py, &card),))?;
            // If it is gone, it says why.
            let _ = answer.send(all.extract::<Vec<Vec<u8>>>()?);
        }
        let built = signals::receive(py, &mut built)?.ok_or_else(errors::ended)?;
        built.map(|inner| Group { inner }).map_err(errors::group)
    }

    /// The group of a torch.distributed process group, the default one if none is named.
    ///
    /// Raises what ``from_exchange`` does.
    #[staticmethod]
    #[pyo3(signature = (process_group = None, *, timeout = 60.0))]
    fn from_torch(
        py: Python<'_>,
        process_group: Option<Bound<'_, PyAny>>,
        timeout: f64,
    ) -> PyResult<Group> {
        let exchange = py.import("direct_dcp._exchange")?;
        let (rank, world_size, all_gather) = exchange
            .getattr("over_torch")?
            .call1((process_group,))?
            .extract()?;
        Group::from_exchange(py, &rank, &world_size, all_gather, timeout)
    }

    /// This rank, from 0.
    #[getter]
    fn rank(&self) -> usize {
        self.inner.rank()
    }

    /// How many ranks there are.
    #[getter]
    fn world_size(&self) -> usize {
        self.inner.world_size()
    }

    /// Larger after each rebuild, and the same on all ranks.
    #[getter]
    fn generation(&self) -> u64 {
        self.inner.generation()
    }

    /// The rank that each rank had before the rebuild.
    #[getter]
    fn previous_ranks(&self) -> Vec<usize> {
        self.inner.previous_ranks().to_vec()
    }

    /// Collective: passes bytes to every rank, and returns those of all, in rank order.
    ///
    /// Raises Timeout, PeerLost, Aborted, and Mismatch if a rank called another collective.
    fn all_gather<'py>(
        &self,
        py: Python<'py>,
        data: Vec<u8>,
    ) -> PyResult<Vec<Bound<'py, PyBytes>>> {
        let abort = self.inner.abort_handle();
        let all = signals::aborting(py, &abort, || self.inner.all_gather(&data))?;
        let all = all.map_err(errors::group)?;
        Ok(all.iter().map(|bytes| PyBytes::new(py, bytes)).collect())
    }

    /// Collective: returns once every rank has called it. Raises what ``all_gather`` does.
    fn barrier(&self, py: Python<'_>) -> PyResult<()> {
        let abort = self.inner.abort_handle();
        signals::aborting(py, &abort, || self.inner.barrier())?.map_err(errors::group)
    }

    /// Ends every wait of every rank, now and from now on; they raise Aborted.
    fn abort(&self) {
        self.inner.abort();
    }

    /// Agrees on a new group with the ranks that call this within ``deadline`` seconds.
    ///
    /// Raises Excluded if the others went on without this rank, Error if nobody else is left or
    /// this group was rebuilt before.
    #[pyo3(signature = (deadline = 5.0))]
    fn rebuild(&self, py: Python<'_>, deadline: f64) -> PyResult<Group> {
        let deadline = errors::seconds("deadline", deadline)?;
        let group = self.inner.clone();
        let inner = signals::leaving(py, move || group.rebuild(deadline))?;
        inner.map(|inner| Group { inner }).map_err(errors::group)
    }

    fn __repr__(&self) -> String {
        let group = &self.inner;
        let (rank, world, generation) = (group.rank(), group.world_size(), group.generation());
        format!("Group(rank={rank}, world_size={world}, generation={generation})")
    }
}

/// A store that the thread which wants the group calls.
struct Exchange {
    rank: usize,
    world_size: usize,
    ask: Sender<Vec<u8>>,
    answers: Receiver<Vec<Vec<u8>>>,
}

impl direct_dcp::Exchange for Exchange {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.world_size
    }

    fn all_gather(&mut self, bytes: &[u8]) -> io::Result<Vec<Vec<u8>>> {
        self.ask.send(bytes.to_vec()).map_err(io::Error::other)?;
        // It hangs up if the store raises.
        self.answers.recv().map_err(io::Error::other)
    }
}
