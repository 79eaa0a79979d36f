//! Final layouts, and the rows that are stored by them.

use std::sync::Arc;

use direct_dcp::{FinalLayout, Pages, cuda};
use pyo3::prelude::*;

use crate::errors;
use crate::gather::On;
use crate::memory::Span;
use crate::row_map::RowMap;

/// Where every row of this rank goes, and how rows are split.
#[pyclass(frozen, module = "direct_dcp._native")]
pub(crate) struct Layout {
    pub(crate) host: Arc<FinalLayout>,
    /// The same in the memory of a device. None in host memory, and while it is dropped.
    pub(crate) device: Option<cuda::FinalLayout>,
}

impl Layout {
    /// The layout of `map` for rows of `on`, split after each of `planes` elements.
    pub(crate) fn new(py: Python<'_>, on: &On, map: &RowMap, planes: &[usize]) -> PyResult<Self> {
        let format = match on {
            On::Cpu(gather) => gather.workspace().format(),
            On::Gpu(on) => on.gather.workspace().format(),
        };
        let host = FinalLayout::new(&map.0, format, planes).map_err(errors::plan)?;
        let device = match on {
            On::Cpu(_) => None,
            On::Gpu(on) => {
                let workspace = on.gather.workspace();
                let device = py.detach(|| cuda::FinalLayout::new(workspace, &host));
                Some(device.map_err(errors::gather)?)
            }
        };
        Ok(Layout {
            host: Arc::new(host),
            device,
        })
    }
}

#[pymethods]
impl Layout {
    #[getter]
    fn local_rows(&self) -> usize {
        self.host.local_rows()
    }

    #[getter]
    fn total_rows(&self) -> usize {
        self.host.total_rows()
    }

    #[getter]
    fn plane_bytes(&self) -> Vec<usize> {
        self.host.plane_bytes()
    }
}

impl Drop for Layout {
    /// Freeing the memory of a device waits for what runs there, and that for peers.
    fn drop(&mut self) {
        crate::drop_detached(self.device.take());
    }
}

/// The rows that a rank contributes: they themselves, or the cache that they are in, and where; and
/// what e4m3 elements are multiplied by on their way to bf16.
#[derive(Clone, Copy, FromPyObject)]
pub(crate) struct Source(
    pub(crate) Span,
    pub(crate) Option<Paged>,
    pub(crate) Option<f32>,
);

/// How rows lie in a cache, as `Pages` has it, and a u32 for each that says where.
#[derive(Clone, Copy, FromPyObject)]
pub(crate) struct Paged(
    pub(crate) usize,
    pub(crate) usize,
    pub(crate) usize,
    pub(crate) Span,
);

impl Paged {
    pub(crate) fn pages(self) -> Pages {
        let Paged(page_rows, page_stride, row_stride, _) = self;
        Pages {
            page_rows,
            page_stride,
            row_stride,
        }
    }
}
