//! What a group on given devices would do, told without doing it.

use direct_dcp_cuda::gather::Delivery;
use direct_dcp_cuda::{CudaError, Device, DeviceAttribute};

use super::choice::Choice;
use super::memory::Fact;
use super::multicast;
use crate::options::Way;

/// The ways that a group takes unless told otherwise, if its self-test passes.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Outlook {
    /// The first way that the group tries.
    pub way: Way,
    /// The way that it tries beside it, for calls that copy out.
    pub copy_out: Way,
    /// Why that is not [`Way::Multicast`], if it is not.
    pub obstacle: Option<String>,
}

impl Outlook {
    /// For a group with one rank on each of `devices`, in rank order, and rows of `row_bytes`
    /// bytes. No multicast object is created to find out.
    ///
    /// # Errors
    /// The driver's.
    pub fn new(devices: &[Device], row_bytes: u32) -> Result<Self, CudaError> {
        let facts = devices
            .iter()
            .map(|device| {
                Ok(Fact {
                    uuid: device.uuid()?,
                    multicast: device.supports(DeviceAttribute::MulticastSupported)?,
                    name: device.name()?,
                })
            })
            .collect::<Result<Vec<_>, CudaError>>()?;
        let obstacle = multicast::obstacle(&facts, row_bytes);
        let obstacle = obstacle.or_else(|| {
            let variable = multicast::forbidden_by()?;
            Some(format!("the environment forbids it ({variable})"))
        });
        let choice = match obstacle {
            Some(_) => Choice::push_and_pull(),
            None => Choice::only(Way::Multicast),
        };
        Ok(Outlook {
            way: choice.way(),
            copy_out: choice.of(Delivery::CopyOut, 0).way,
            obstacle,
        })
    }
}

/// The variable of this process's environment that forbids multicast, if one does.
#[must_use]
pub fn multicast_forbidden_by() -> Option<&'static str> {
    multicast::forbidden_by()
}
