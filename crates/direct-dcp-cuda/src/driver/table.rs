//! The table of driver functions, each optional, and the thin layer that turns codes into errors.
//!
//! One list declares everything about a function: its symbol, the group it is reported under and
//! its C parameters. From it come the table's field, the look-up, and a method of the same name
//! that calls the pointer and returns `Result`. Symbols carry their version suffix where the
//! header renames them (`cuMemAlloc` means `cuMemAlloc_v2`): the unsuffixed names are the ABI of
//! CUDA 3 and are still exported.

#![allow(unsafe_code)] // looking up and calling C functions
#![allow(non_snake_case)] // functions keep their C names

#[cfg(test)]
mod shape;

use core::ffi::{CStr, c_char, c_int, c_uint, c_ulonglong, c_void};

use super::SymbolGroup;
use crate::error::{CudaError, Result};
use crate::sys::*;

macro_rules! driver_api {
    ($($group:ident { $($name:ident($($arg:ident: $ty:ty),* $(,)?);)* })*) => {
        /// The functions that the opened library has.
        #[derive(Debug)]
        pub(crate) struct Table {
            library: String,
            $($($name: Option<unsafe extern "C" fn($($ty),*) -> CUresult>,)*)*
        }

        impl Table {
            /// Looks every function up; a missing one is remembered, not an error.
            pub(crate) fn load(library: &libloading::Library, name: String) -> Self {
                Self {
                    library: name,
                    $($($name: {
                        // SAFETY: the type is the header's declaration of this symbol, which
                        // `shape` compares with NVIDIA's in tests.
                        unsafe { library.get(concat!(stringify!($name), "\0").as_bytes()) }
                            .ok()
                            .map(|symbol: libloading::Symbol<'_, _>| *symbol)
                    },)*)*
                }
            }

            /// A table of nothing.
            #[cfg(test)]
            fn empty() -> Self {
                Self { library: String::new(), $($($name: None,)*)* }
            }

            /// Every function: its group, its name, whether the library has it.
            pub(crate) fn inventory(&self) -> Vec<(SymbolGroup, &'static str, bool)> {
                vec![$($((SymbolGroup::$group, stringify!($name), self.$name.is_some()),)*)*]
            }

            $($(
                /// Calls the driver function of this name.
                ///
                /// # Safety
                /// What NVIDIA's documentation of the function asks of its arguments: pointers
                /// that it reads and writes are valid, handles are live.
                #[allow(clippy::too_many_arguments)] // the C declaration's
                #[allow(dead_code)] // `explain` calls two of them through their fields
                pub(crate) unsafe fn $name(&self, $($arg: $ty),*) -> Result<()> {
                    let Some(function) = self.$name else {
                        return Err(self.missing(stringify!($name)));
                    };
                    // SAFETY: the caller keeps this function's contract, and the pointer was
                    // looked up under this name in a library that is never unloaded.
                    let code = unsafe { function($($arg),*) };
                    self.check(stringify!($name), code)
                }
            )*)*
        }
    };
}

driver_api! {
    Core {
        cuInit(flags: c_uint);
        cuDriverGetVersion(version: *mut c_int);
        cuGetErrorName(error: CUresult, name: *mut *const c_char);
        cuGetErrorString(error: CUresult, text: *mut *const c_char);
        cuDeviceGet(device: *mut CUdevice, ordinal: c_int);
        cuDeviceGetCount(count: *mut c_int);
        cuDeviceGetName(name: *mut c_char, len: c_int, device: CUdevice);
        cuDeviceGetUuid_v2(uuid: *mut CUuuid, device: CUdevice);
        cuDeviceGetPCIBusId(id: *mut c_char, len: c_int, device: CUdevice);
        cuDeviceGetAttribute(value: *mut c_int, attribute: c_uint, device: CUdevice);
        cuDeviceTotalMem_v2(bytes: *mut usize, device: CUdevice);
        cuDeviceCanAccessPeer(can: *mut c_int, device: CUdevice, peer: CUdevice);
        cuDeviceGetP2PAttribute(value: *mut c_int, attribute: c_uint, source: CUdevice, destination: CUdevice);
        cuDevicePrimaryCtxRetain(context: *mut CUcontext, device: CUdevice);
        cuDevicePrimaryCtxRelease_v2(device: CUdevice);
        cuCtxPushCurrent_v2(context: CUcontext);
        cuCtxPopCurrent_v2(context: *mut CUcontext);
        cuCtxGetCurrent(context: *mut CUcontext);
        cuCtxSynchronize();
        cuCtxEnablePeerAccess(peer: CUcontext, flags: c_uint);
        cuStreamCreate(stream: *mut CUstream, flags: c_uint);
        cuStreamDestroy_v2(stream: CUstream);
        cuStreamGetCtx(stream: CUstream, context: *mut CUcontext);
        cuStreamSynchronize(stream: CUstream);
        cuStreamQuery(stream: CUstream);
        cuStreamWaitEvent(stream: CUstream, event: CUevent, flags: c_uint);
        cuEventCreate(event: *mut CUevent, flags: c_uint);
        cuEventDestroy_v2(event: CUevent);
        cuEventRecord(event: CUevent, stream: CUstream);
        cuEventQuery(event: CUevent);
        cuEventSynchronize(event: CUevent);
        cuEventElapsedTime(milliseconds: *mut f32, start: CUevent, end: CUevent);
        cuMemGetInfo_v2(free: *mut usize, total: *mut usize);
        cuMemAlloc_v2(address: *mut CUdeviceptr, bytes: usize);
        cuMemFree_v2(address: CUdeviceptr);
        cuMemHostAlloc(pointer: *mut *mut c_void, bytes: usize, flags: c_uint);
        cuMemFreeHost(pointer: *mut c_void);
        cuMemHostGetDevicePointer_v2(address: *mut CUdeviceptr, pointer: *mut c_void, flags: c_uint);
        cuMemcpyHtoDAsync_v2(destination: CUdeviceptr, source: *const c_void, bytes: usize, stream: CUstream);
        cuMemcpyDtoHAsync_v2(destination: *mut c_void, source: CUdeviceptr, bytes: usize, stream: CUstream);
        cuMemcpyDtoDAsync_v2(destination: CUdeviceptr, source: CUdeviceptr, bytes: usize, stream: CUstream);
        cuMemcpy2DAsync_v2(copy: *const CUDA_MEMCPY2D, stream: CUstream);
        cuMemsetD8Async(destination: CUdeviceptr, value: u8, count: usize, stream: CUstream);
        cuMemsetD32Async(destination: CUdeviceptr, value: c_uint, count: usize, stream: CUstream);
        cuModuleLoadDataEx(module: *mut CUmodule, image: *const c_void, options: c_uint, keys: *mut c_uint, values: *mut *mut c_void);
        cuModuleUnload(module: CUmodule);
        cuModuleGetFunction(function: *mut CUfunction, module: CUmodule, name: *const c_char);
        cuFuncGetAttribute(value: *mut c_int, attribute: c_uint, function: CUfunction);
        cuLaunchKernel(
            function: CUfunction,
            grid_x: c_uint, grid_y: c_uint, grid_z: c_uint,
            block_x: c_uint, block_y: c_uint, block_z: c_uint,
            shared_bytes: c_uint, stream: CUstream,
            parameters: *mut *mut c_void, extra: *mut *mut c_void,
        );
    }
    Functions {
        cuFuncLoad(function: CUfunction);
        cuFuncGetParamInfo(function: CUfunction, index: usize, offset: *mut usize, bytes: *mut usize);
    }
    Occupancy {
        cuOccupancyMaxActiveBlocksPerMultiprocessor(blocks: *mut c_int, function: CUfunction, block: c_int, shared_bytes: usize);
    }
    Graphs {
        cuStreamBeginCapture_v2(stream: CUstream, mode: c_uint);
        cuStreamEndCapture(stream: CUstream, graph: *mut CUgraph);
        cuStreamIsCapturing(stream: CUstream, status: *mut c_uint);
        cuGraphInstantiateWithFlags(executable: *mut CUgraphExec, graph: CUgraph, flags: c_ulonglong);
        cuGraphUpload(executable: CUgraphExec, stream: CUstream);
        cuGraphLaunch(executable: CUgraphExec, stream: CUstream);
        cuGraphExecDestroy(executable: CUgraphExec);
        cuGraphDestroy(graph: CUgraph);
    }
    StreamMemoryOps {
        cuStreamWriteValue32_v2(stream: CUstream, address: CUdeviceptr, value: u32, flags: c_uint);
        cuStreamWaitValue32_v2(stream: CUstream, address: CUdeviceptr, value: u32, flags: c_uint);
    }
    Vmm {
        cuMemGetAllocationGranularity(bytes: *mut usize, properties: *const CUmemAllocationProp, option: c_uint);
        cuMemCreate(handle: *mut CUmemGenericAllocationHandle, bytes: usize, properties: *const CUmemAllocationProp, flags: c_ulonglong);
        cuMemRelease(handle: CUmemGenericAllocationHandle);
        cuMemAddressReserve(address: *mut CUdeviceptr, bytes: usize, alignment: usize, hint: CUdeviceptr, flags: c_ulonglong);
        cuMemAddressFree(address: CUdeviceptr, bytes: usize);
        cuMemMap(address: CUdeviceptr, bytes: usize, offset: usize, handle: CUmemGenericAllocationHandle, flags: c_ulonglong);
        cuMemUnmap(address: CUdeviceptr, bytes: usize);
        cuMemSetAccess(address: CUdeviceptr, bytes: usize, access: *const CUmemAccessDesc, count: usize);
        cuMemGetAllocationPropertiesFromHandle(properties: *mut CUmemAllocationProp, handle: CUmemGenericAllocationHandle);
        cuMemExportToShareableHandle(shareable: *mut c_void, handle: CUmemGenericAllocationHandle, kind: c_uint, flags: c_ulonglong);
        cuMemImportFromShareableHandle(handle: *mut CUmemGenericAllocationHandle, shareable: *mut c_void, kind: c_uint);
    }
    Multicast {
        cuMulticastGetGranularity(bytes: *mut usize, properties: *const CUmulticastObjectProp, option: c_uint);
        cuMulticastCreate(handle: *mut CUmemGenericAllocationHandle, properties: *const CUmulticastObjectProp);
        cuMulticastAddDevice(handle: CUmemGenericAllocationHandle, device: CUdevice);
        cuMulticastBindMem(handle: CUmemGenericAllocationHandle, offset: usize, memory: CUmemGenericAllocationHandle, memory_offset: usize, bytes: usize, flags: c_ulonglong);
        cuMulticastBindAddr(handle: CUmemGenericAllocationHandle, offset: usize, address: CUdeviceptr, bytes: usize, flags: c_ulonglong);
        cuMulticastUnbind(handle: CUmemGenericAllocationHandle, device: CUdevice, offset: usize, bytes: usize);
    }
}

/// The type of the two functions that explain a code.
type Explain = unsafe extern "C" fn(CUresult, *mut *const c_char) -> CUresult;

impl Table {
    fn missing(&self, symbol: &'static str) -> CudaError {
        CudaError::SymbolMissing {
            symbol,
            library: self.library.clone(),
        }
    }

    fn check(&self, call: &'static str, code: CUresult) -> Result<()> {
        if code == CUDA_SUCCESS {
            return Ok(());
        }
        let name = explain(self.cuGetErrorName, code).unwrap_or_else(|| "unknown error".into());
        let message =
            explain(self.cuGetErrorString, code).unwrap_or_else(|| "no description".into());
        Err(CudaError::Driver {
            call,
            code,
            name,
            message,
        })
    }
}

/// Asks the driver for a text about a code; `None` where it has none.
fn explain(function: Option<Explain>, code: CUresult) -> Option<String> {
    let mut text: *const c_char = core::ptr::null();
    // SAFETY: the function takes any integer, and writes one pointer to the place that it is given.
    let answer = unsafe { function?(code, &mut text) };
    if answer != CUDA_SUCCESS || text.is_null() {
        return None;
    }
    // SAFETY: on success the pointer is a NUL-terminated string that lives as long as the library,
    // which is never unloaded.
    Some(
        unsafe { CStr::from_ptr(text) }
            .to_string_lossy()
            .into_owned(),
    )
}
