//! The driver's binary interface: handles, structures and constants, written by hand.
//!
//! Only what this crate calls is here. Names are the header's (`cuda.h`), so that NVIDIA's
//! documentation can be searched for them. `tests/abi.rs` checks every size, alignment, offset and
//! value against types generated from NVIDIA's header.

#![allow(unsafe_code)] // `Send` and `Sync` of the opaque handles, argued at the macro
#![allow(non_upper_case_globals)]

use core::ffi::{c_int, c_uint, c_ulonglong, c_void};

/// Declares an opaque handle: a pointer that only the driver looks behind.
macro_rules! opaque {
    ($($(#[$doc:meta])* $name:ident;)*) => {$(
        $(#[$doc])*
        #[repr(transparent)]
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub struct $name(pub *mut c_void);

        // SAFETY: the pointer is a token. This crate never dereferences it, and the driver allows
        // every handle to be used from any thread.
        unsafe impl Send for $name {}
        // SAFETY: as above; the driver does its own locking.
        unsafe impl Sync for $name {}

        impl $name {
            /// The null handle, a placeholder that a creating call overwrites.
            pub const NULL: Self = Self(core::ptr::null_mut());
        }
    )*};
}

opaque! {
    /// `CUcontext`.
    CUcontext;
    /// `CUstream`. 0 is the default stream, 1 the legacy and 2 the per-thread default stream.
    CUstream;
    /// `CUevent`.
    CUevent;
    /// `CUmodule`.
    CUmodule;
    /// `CUfunction`.
    CUfunction;
    /// `CUgraph`.
    CUgraph;
    /// `CUgraphExec`.
    CUgraphExec;
}

/// `CUresult`, as an integer: a newer driver may return a code that this crate does not know.
pub type CUresult = c_int;
/// `CUdevice`.
pub type CUdevice = c_int;
/// `CUdeviceptr`.
pub type CUdeviceptr = c_ulonglong;
/// `CUmemGenericAllocationHandle`: memory or a multicast object.
pub type CUmemGenericAllocationHandle = c_ulonglong;

/// `CUDA_SUCCESS`.
pub const CUDA_SUCCESS: CUresult = 0;
/// `CUDA_ERROR_INVALID_VALUE`.
pub const CUDA_ERROR_INVALID_VALUE: CUresult = 1;
/// `CUDA_ERROR_OUT_OF_MEMORY`.
pub const CUDA_ERROR_OUT_OF_MEMORY: CUresult = 2;
/// `CUDA_ERROR_NO_DEVICE`.
pub const CUDA_ERROR_NO_DEVICE: CUresult = 100;
/// `CUDA_ERROR_NOT_READY`: not a failure, the answer of a query.
pub const CUDA_ERROR_NOT_READY: CUresult = 600;
/// `CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED`.
pub const CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED: CUresult = 704;
/// `CUDA_ERROR_NOT_PERMITTED`.
pub const CUDA_ERROR_NOT_PERMITTED: CUresult = 800;
/// `CUDA_ERROR_NOT_SUPPORTED`.
pub const CUDA_ERROR_NOT_SUPPORTED: CUresult = 801;
/// `CUDA_ERROR_SYSTEM_NOT_READY`: with multicast and fabric handles, the fabric manager is down.
pub const CUDA_ERROR_SYSTEM_NOT_READY: CUresult = 802;

/// `CU_DEVICE_P2P_ATTRIBUTE_PERFORMANCE_RANK`.
pub const CU_DEVICE_P2P_ATTRIBUTE_PERFORMANCE_RANK: c_uint = 1;
/// `CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED`.
pub const CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED: c_uint = 2;
/// `CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED`.
pub const CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED: c_uint = 3;

/// `CU_STREAM_NON_BLOCKING`: no implicit ordering with the legacy default stream.
pub const CU_STREAM_NON_BLOCKING: c_uint = 1;
/// `CU_STREAM_LEGACY`.
pub const CU_STREAM_LEGACY: usize = 1;
/// `CU_STREAM_PER_THREAD`.
pub const CU_STREAM_PER_THREAD: usize = 2;
/// `CU_EVENT_DEFAULT`.
pub const CU_EVENT_DEFAULT: c_uint = 0;
/// `CU_EVENT_DISABLE_TIMING`.
pub const CU_EVENT_DISABLE_TIMING: c_uint = 2;

/// `CU_MEMHOSTALLOC_PORTABLE`: pinned for every context, not only the current one.
pub const CU_MEMHOSTALLOC_PORTABLE: c_uint = 1;
/// `CU_MEMHOSTALLOC_DEVICEMAP`: the device can read and write it in place.
pub const CU_MEMHOSTALLOC_DEVICEMAP: c_uint = 2;

/// `CU_MEM_ALLOCATION_TYPE_PINNED`, the only kind that exists.
pub const CU_MEM_ALLOCATION_TYPE_PINNED: c_uint = 1;
/// `CU_MEMORYTYPE_UNIFIED`: the address says where the memory is.
pub const CU_MEMORYTYPE_UNIFIED: c_uint = 4;

/// `CU_MEM_LOCATION_TYPE_DEVICE`.
pub const CU_MEM_LOCATION_TYPE_DEVICE: c_uint = 1;
/// `CU_MEM_HANDLE_TYPE_NONE`.
pub const CU_MEM_HANDLE_TYPE_NONE: c_uint = 0;
/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`.
pub const CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR: c_uint = 1;
/// `CU_MEM_HANDLE_TYPE_FABRIC`.
pub const CU_MEM_HANDLE_TYPE_FABRIC: c_uint = 8;
/// `CU_MEM_ACCESS_FLAGS_PROT_READWRITE`.
pub const CU_MEM_ACCESS_FLAGS_PROT_READWRITE: c_uint = 3;
/// `CU_MEM_ALLOC_GRANULARITY_MINIMUM`; `CU_MULTICAST_GRANULARITY_MINIMUM` is the same.
pub const CU_MEM_ALLOC_GRANULARITY_MINIMUM: c_uint = 0;
/// `CU_MEM_ALLOC_GRANULARITY_RECOMMENDED`; `CU_MULTICAST_GRANULARITY_RECOMMENDED` is the same.
pub const CU_MEM_ALLOC_GRANULARITY_RECOMMENDED: c_uint = 1;

/// `CU_JIT_INFO_LOG_BUFFER`.
pub const CU_JIT_INFO_LOG_BUFFER: c_uint = 3;
/// `CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES`.
pub const CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES: c_uint = 4;
/// `CU_JIT_ERROR_LOG_BUFFER`.
pub const CU_JIT_ERROR_LOG_BUFFER: c_uint = 5;
/// `CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES`.
pub const CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES: c_uint = 6;

/// `CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK`.
pub const CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK: c_uint = 0;
/// `CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES`.
pub const CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES: c_uint = 1;
/// `CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES`.
pub const CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES: c_uint = 3;
/// `CU_FUNC_ATTRIBUTE_NUM_REGS`.
pub const CU_FUNC_ATTRIBUTE_NUM_REGS: c_uint = 4;
/// `CU_FUNC_ATTRIBUTE_PTX_VERSION`.
pub const CU_FUNC_ATTRIBUTE_PTX_VERSION: c_uint = 5;
/// `CU_FUNC_ATTRIBUTE_BINARY_VERSION`.
pub const CU_FUNC_ATTRIBUTE_BINARY_VERSION: c_uint = 6;

/// `CU_STREAM_CAPTURE_MODE_GLOBAL`.
pub const CU_STREAM_CAPTURE_MODE_GLOBAL: c_uint = 0;
/// `CU_STREAM_CAPTURE_MODE_THREAD_LOCAL`.
pub const CU_STREAM_CAPTURE_MODE_THREAD_LOCAL: c_uint = 1;
/// `CU_STREAM_CAPTURE_MODE_RELAXED`.
pub const CU_STREAM_CAPTURE_MODE_RELAXED: c_uint = 2;
/// `CU_STREAM_CAPTURE_STATUS_NONE`.
pub const CU_STREAM_CAPTURE_STATUS_NONE: c_uint = 0;
/// `CU_STREAM_CAPTURE_STATUS_ACTIVE`.
pub const CU_STREAM_CAPTURE_STATUS_ACTIVE: c_uint = 1;
/// `CU_STREAM_CAPTURE_STATUS_INVALIDATED`.
pub const CU_STREAM_CAPTURE_STATUS_INVALIDATED: c_uint = 2;

/// `CU_STREAM_WAIT_VALUE_GEQ`: cyclic comparison, `(i32)(*addr - value) >= 0`.
pub const CU_STREAM_WAIT_VALUE_GEQ: c_uint = 0;
/// `CU_STREAM_WAIT_VALUE_EQ`.
pub const CU_STREAM_WAIT_VALUE_EQ: c_uint = 1;
/// `CU_STREAM_WRITE_VALUE_DEFAULT`: a memory barrier comes before the write.
pub const CU_STREAM_WRITE_VALUE_DEFAULT: c_uint = 0;

/// `CUuuid`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct CUuuid {
    /// The sixteen bytes, most significant first.
    pub bytes: [u8; 16],
}

/// `CUmemLocation`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct CUmemLocation {
    /// `CU_MEM_LOCATION_TYPE_*`.
    pub kind: c_uint,
    /// The device ordinal.
    pub id: c_int,
}

/// `CUmemAllocationProp`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CUmemAllocationProp {
    /// `CU_MEM_ALLOCATION_TYPE_*`.
    pub kind: c_uint,
    /// Mask of `CU_MEM_HANDLE_TYPE_*`.
    pub requested_handle_types: c_uint,
    /// Where the memory lies.
    pub location: CUmemLocation,
    /// Unused on Linux; null.
    pub win32_handle_meta_data: *mut c_void,
    /// Compression, RDMA, usage.
    pub alloc_flags: CUmemAllocationFlags,
}

/// The anonymous structure at the end of `CUmemAllocationProp`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct CUmemAllocationFlags {
    /// `CU_MEM_ALLOCATION_COMP_*`.
    pub compression_type: u8,
    /// Non-zero: a network card may read and write the memory.
    pub gpu_direct_rdma_capable: u8,
    /// `CU_MEM_CREATE_USAGE_*`.
    pub usage: u16,
    /// Zero.
    pub reserved: [u8; 4],
}

/// `CUmemAccessDesc`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct CUmemAccessDesc {
    /// Who gains access.
    pub location: CUmemLocation,
    /// `CU_MEM_ACCESS_FLAGS_PROT_*`.
    pub flags: c_uint,
}

/// `CUmemFabricHandle`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CUmemFabricHandle {
    /// Opaque bytes.
    pub data: [u8; 64],
}

/// `CUDA_MEMCPY2D`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CUDA_MEMCPY2D {
    /// Bytes to skip at the start of each row of the source.
    pub src_x_in_bytes: usize,
    /// Rows of the source to skip.
    pub src_y: usize,
    /// `CU_MEMORYTYPE_*`.
    pub src_memory_type: c_uint,
    /// The source, if it is host memory.
    pub src_host: *const c_void,
    /// The source.
    pub src_device: CUdeviceptr,
    /// The source, if it is an array.
    pub src_array: *mut c_void,
    /// Bytes from one row of the source to the next.
    pub src_pitch: usize,
    /// Bytes to skip at the start of each row of the destination.
    pub dst_x_in_bytes: usize,
    /// Rows of the destination to skip.
    pub dst_y: usize,
    /// `CU_MEMORYTYPE_*`.
    pub dst_memory_type: c_uint,
    /// The destination, if it is host memory.
    pub dst_host: *mut c_void,
    /// The destination.
    pub dst_device: CUdeviceptr,
    /// The destination, if it is an array.
    pub dst_array: *mut c_void,
    /// Bytes from one row of the destination to the next.
    pub dst_pitch: usize,
    /// Bytes of each row to copy.
    pub width_in_bytes: usize,
    /// Rows to copy.
    pub height: usize,
}

/// `CUmulticastObjectProp`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct CUmulticastObjectProp {
    /// How many devices will be added.
    pub num_devices: c_uint,
    /// Bytes that can be bound for each device.
    pub size: usize,
    /// Mask of `CU_MEM_HANDLE_TYPE_*`.
    pub handle_types: c_ulonglong,
    /// Zero.
    pub flags: c_ulonglong,
}
