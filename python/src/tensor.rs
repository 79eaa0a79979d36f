//! Where a tensor of torch lies, asked in one call.
//!
//! By torch's methods it takes seven, and a microsecond or two: much of what the host spends on a
//! gather. From 2.10 on torch passes on a C function that tells all of it, as DLPack 1.3 has it.
#![allow(unsafe_code)] // calling that function, and reading what it tells

use core::ffi::{CStr, c_int, c_void};
use core::mem::MaybeUninit;
use core::slice;

use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyCapsule;
use pyo3::{ffi, intern};

/// What DLPack numbers devices and elements by.
const ON_CPU: i32 = 1;
const ON_CUDA: i32 = 2;
const COMPLEX: u8 = 5;

/// DLPack's `DLTensor`.
#[repr(C)]
struct Described {
    data: *const c_void,
    device_type: i32,
    device: i32,
    dimensions: i32,
    code: u8,
    bits: u8,
    lanes: u16,
    shape: *const i64,
    strides: *const i64,
    byte_offset: u64,
}

type Describe = unsafe extern "C" fn(*mut ffi::PyObject, *mut Described) -> c_int;

/// DLPack's `DLPackExchangeAPI`, up to the function that is called here.
#[repr(C)]
struct ExchangeApi {
    major: u32,
    minor: u32,
    previous: *const c_void,
    others: [*const c_void; 3],
    describe: Option<Describe>,
}

const API_NAME: &CStr = c"dlpack_exchange_api";

/// What is asked of torch once.
struct Torch {
    tensor: Py<PyAny>,
    describe: Describe,
}

impl Torch {
    /// None where torch was not imported, not to its end, or is too old.
    fn get(py: Python<'_>) -> Option<&'static Torch> {
        static TORCH: PyOnceLock<Option<Torch>> = PyOnceLock::new();
        if let Some(torch) = TORCH.get(py) {
            return torch.as_ref();
        }
        let sys = py.import(intern!(py, "sys")).ok()?;
        let torch = sys.getattr("modules").ok()?.get_item("torch").ok()?;
        let tensor = torch.getattr("Tensor").ok()?;
        TORCH.get_or_init(py, || Torch::of(tensor)).as_ref()
    }

    fn of(tensor: Bound<'_, PyAny>) -> Option<Torch> {
        let capsule = tensor.getattr("__dlpack_c_exchange_api__").ok()?;
        let capsule = capsule.cast_into::<PyCapsule>().ok()?;
        let api = capsule.pointer_checked(Some(API_NAME)).ok()?;
        let api = api.cast::<ExchangeApi>();
        // SAFETY: a capsule of this name holds this structure, which lives as long as torch; all of
        // one major version begin as this one does.
        let api = unsafe { api.as_ref() };
        Some(Torch {
            tensor: tensor.unbind(),
            describe: api.describe.filter(|_| api.major == 1)?,
        })
    }

    fn describe(&self, tensor: &Bound<'_, PyAny>) -> Option<Described> {
        let mut described = MaybeUninit::uninit();
        // SAFETY: an object, and room for what is told of it, which is whole where 0 is returned.
        // The interpreter's lock is held.
        let code = unsafe { (self.describe)(tensor.as_ptr(), described.as_mut_ptr()) };
        if code != 0 {
            drop(PyErr::take(tensor.py()));
            return None;
        }
        // SAFETY: it is whole.
        Some(unsafe { described.assume_init() })
    }
}

impl Described {
    /// Bytes, if they lie one behind the other and are what the elements are.
    fn contiguous_bytes(&self) -> Option<usize> {
        let bits = usize::from(self.bits) * usize::from(self.lanes);
        if self.code == COMPLEX || !bits.is_multiple_of(8) {
            return None;
        }
        let dimensions = usize::try_from(self.dimensions).ok()?;
        if dimensions == 0 {
            return Some(bits / 8);
        }
        if self.shape.is_null() || self.strides.is_null() {
            return None;
        }
        // SAFETY: as many numbers as there are dimensions, which live as long as the tensor, of
        // which the caller has a reference.
        let shape = unsafe { slice::from_raw_parts(self.shape, dimensions) };
        // SAFETY: as above.
        let strides = unsafe { slice::from_raw_parts(self.strides, dimensions) };
        if shape.contains(&0) {
            return Some(0);
        }
        let mut elements = 1_i64;
        for (&extent, &stride) in shape.iter().zip(strides).rev() {
            if extent != 1 && stride != elements {
                return None;
            }
            elements = elements.checked_mul(extent)?;
        }
        usize::try_from(elements).ok()?.checked_mul(bits / 8)
    }
}

/// The address and the size of a tensor on a device, or on the CPU. None of anything that is not
/// plainly that: whoever asks finds out by other means what it is. Raises what an interrupt does.
#[pyfunction]
pub(crate) fn span(
    rows: &Bound<'_, PyAny>,
    device: Option<i32>,
) -> PyResult<Option<(usize, usize)>> {
    let Some(span) = described_span(rows, device) else {
        return Ok(None);
    };
    // The one thing that DLPack does not know of. It may run code of Python's.
    let negative = rows.call_method0(intern!(rows.py(), "is_neg"))?;
    Ok((!negative.is_truthy()?).then_some(span))
}

fn described_span(rows: &Bound<'_, PyAny>, device: Option<i32>) -> Option<(usize, usize)> {
    let torch = Torch::get(rows.py())?;
    // Classes of others may have no memory, or other memory than it seems.
    if !rows.get_type().is(&torch.tensor) {
        return None;
    }
    let described = torch.describe(rows)?;
    let there = match device {
        Some(device) => (described.device_type, described.device) == (ON_CUDA, device),
        None => described.device_type == ON_CPU,
    };
    let bytes = described.contiguous_bytes().filter(|_| there)?;
    let offset = usize::try_from(described.byte_offset).ok()?;
    let address = described.data.expose_provenance().checked_add(offset)?;
    Some((address, bytes))
}
