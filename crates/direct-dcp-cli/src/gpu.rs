//! GPUs, as far as commands ask before any rank starts.

use crate::again;
use crate::error::{Error, plain};
use crate::ranks::{Backend, RankError};
use crate::report;
use direct_dcp::cuda::{CudaError, Device, Driver};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::env;
use std::os::unix::process::CommandExt;
use std::sync::Arc;

/// How many hardware queues the driver uses for a process; it reads this when it is loaded.
pub(crate) const QUEUES_VARIABLE: &str = "CUDA_DEVICE_MAX_CONNECTIONS";
/// The most that it takes.
pub(crate) const MOST_QUEUES: u32 = 32;
/// What it uses if nobody says anything.
pub(crate) const DEFAULT_QUEUES: u32 = 8;

/// Where the ranks' rows are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Place {
    /// In host memory.
    Cpu,
    /// In the memory of the ranks' devices: of rank r, device r modulo their number, unless all
    /// are on one.
    Cuda { device: Option<u32> },
}

impl Place {
    /// What the options ask for.
    pub(crate) fn of(backend: Backend, device: Option<u32>) -> Result<Place, Error> {
        match (backend.on_gpus(), device) {
            (true, device) => Ok(Place::Cuda { device }),
            (false, None) => Ok(Place::Cpu),
            (false, Some(_)) => Err(Error::Usage(
                "--device is for GPUs; use it with --backend cuda or cuda-processes".into(),
            )),
        }
    }
}

/// The devices that a run is going to use.
#[derive(Debug)]
pub(crate) struct Gpus {
    driver: Arc<Driver>,
    device: Option<u32>,
    count: u32,
}

impl Gpus {
    /// Opens the driver, and checks that there are devices, and this one if one is named.
    pub(crate) fn open(device: Option<u32>) -> Result<Gpus, Error> {
        let opened = || {
            let driver = Driver::load()?;
            let count = Device::count(&driver)?;
            if let Some(device) = device {
                Device::new(&driver, device)?;
            }
            Ok((driver, count))
        };
        let (driver, count) =
            opened().map_err(|error: CudaError| Error::Failed(error.to_string()))?;
        if count == 0 {
            return Err(Error::Failed(
                "the driver sees no device; look at CUDA_VISIBLE_DEVICES, or have the ranks on CPUs"
                    .into(),
            ));
        }
        Ok(Gpus {
            driver,
            device,
            count,
        })
    }

    /// The device of a rank.
    pub(crate) fn ordinal(&self, rank: usize) -> u32 {
        self.device
            .unwrap_or((rank % self.count.max(1) as usize) as u32)
    }

    pub(crate) fn device(&self, rank: usize) -> Result<Device, CudaError> {
        Device::new(&self.driver, self.ordinal(rank))
    }

    /// The devices of `ranks` ranks, in words.
    pub(crate) fn describe(&self, ranks: usize) -> String {
        let mut names: BTreeMap<u32, String> = BTreeMap::new();
        for rank in 0..ranks.min(self.count as usize) {
            let name = self.device(rank).and_then(|device| device.name());
            names.insert(self.ordinal(rank), name.unwrap_or_else(|_| "?".into()));
        }
        let names: Vec<String> = names
            .iter()
            .map(|(ordinal, name)| format!("device {ordinal} ({name})"))
            .collect();
        names.join(", ")
    }

    /// Refuses what the devices' memory cannot hold: `bytes` for each rank, or too many to count.
    pub(crate) fn check_memory(
        &self,
        ranks: usize,
        bytes: Option<usize>,
        what: &str,
        instead: &str,
    ) -> Result<(), Error> {
        let mut wanted: BTreeMap<u32, u64> = BTreeMap::new();
        for rank in 0..ranks {
            let sum = wanted.entry(self.ordinal(rank)).or_default();
            let bytes = bytes.map_or(u64::MAX, |bytes| bytes as u64);
            *sum = sum.saturating_add(bytes);
        }
        for (ordinal, bytes) in wanted {
            let total = Device::new(&self.driver, ordinal)
                .and_then(|device| device.total_memory())
                .map_err(|error| error.to_string())? as u64;
            if bytes > total {
                return Err(Error::Failed(format!(
                    "{what} needs more memory than device {ordinal} has ({}); {instead}",
                    report::bytes(total)
                )));
            }
        }
        Ok(())
    }
}

/// The device of a rank, asked by the rank itself.
pub(crate) fn ordinal(device: Option<u32>, rank: usize) -> Result<u32, RankError> {
    let count = || Device::count(&*Driver::load()?);
    match device {
        Some(device) => Ok(device),
        None => {
            let count = count().map_err(|error: CudaError| error.to_string())?;
            Ok((rank % count.max(1) as usize) as u32)
        }
    }
}

/// Starts this program anew if the driver would use few hardware queues.
///
/// Ranks that are threads of one process have a stream each, and their kernels wait for each other.
/// Streams that share a queue are executed one after the other, so a kernel may wait for one that
/// is queued behind it. The variable has to be there before the driver is loaded, and a program
/// cannot safely change its own environment.
pub(crate) fn want_queues(backend: Backend) -> Result<(), Error> {
    if backend != Backend::Cuda || env::var_os(QUEUES_VARIABLE).is_some() {
        return Ok(());
    }
    let Some(mut program) = again::same() else {
        return Ok(());
    };
    let error = program.env(QUEUES_VARIABLE, MOST_QUEUES.to_string()).exec();
    Err(Error::Failed(format!(
        "starting anew with more hardware queues: {}; set {QUEUES_VARIABLE}={MOST_QUEUES}",
        plain(&error)
    )))
}
