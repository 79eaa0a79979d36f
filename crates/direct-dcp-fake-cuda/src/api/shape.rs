//! Compares every exported function with NVIDIA's declaration of it, as `cudarc` generated it:
//! as many arguments, each of the same size and alignment, in the same order. Together with the
//! distinct sizes of `int`, `size_t` and pointers that catches most slips.

#![allow(unsafe_code)] // function types

use cudarc::driver::sys as nvidia;

/// Size and alignment of each argument.
trait Shape {
    fn shape(&self) -> Vec<(usize, usize)>;
}

macro_rules! shapes {
    ($(($($arg:ident)*))*) => {$(
        impl<Result, $($arg),*> Shape for unsafe fn($($arg),*) -> Result {
            fn shape(&self) -> Vec<(usize, usize)> {
                vec![$((size_of::<$arg>(), align_of::<$arg>())),*]
            }
        }
        impl<Result, $($arg),*> Shape for extern "C" fn($($arg),*) -> Result {
            fn shape(&self) -> Vec<(usize, usize)> {
                vec![$((size_of::<$arg>(), align_of::<$arg>())),*]
            }
        }
    )*};
}

shapes! { () (A) (A B) (A B C) (A B C D) (A B C D E) (A B C D E F) (A B C D E F G H I J K) }

macro_rules! same {
    ($($module:ident: $($name:ident($($any:tt)*))*;)*) => {$($(
        let ours: extern "C" fn($($any),*) -> _ = super::$module::$name;
        let theirs: unsafe fn($($any),*) -> _ = nvidia::$name;
        assert_eq!(ours.shape(), theirs.shape(), stringify!($name));
    )*)*};
}

#[test]
fn functions_have_the_header_s_shape() {
    // The header of CUDA 13 knows the second version only; the driver exports both, of one shape.
    let ours: extern "C" fn(_, _, _) -> _ = super::stream::cuEventElapsedTime;
    let theirs: unsafe fn(_, _, _) -> _ = nvidia::cuEventElapsedTime_v2;
    assert_eq!(ours.shape(), theirs.shape());
    same! {
        device:
            cuInit(_) cuDriverGetVersion(_) cuDeviceGetCount(_) cuDeviceGet(_ _)
            cuDeviceGetName(_ _ _) cuDeviceGetPCIBusId(_ _ _) cuDeviceGetUuid_v2(_ _)
            cuDeviceGetAttribute(_ _ _) cuDeviceTotalMem_v2(_ _) cuDeviceCanAccessPeer(_ _ _)
            cuDeviceGetP2PAttribute(_ _ _ _) cuDevicePrimaryCtxRetain(_ _)
            cuDevicePrimaryCtxRelease_v2(_) cuCtxPushCurrent_v2(_) cuCtxPopCurrent_v2(_)
            cuCtxGetCurrent(_) cuCtxSynchronize() cuCtxEnablePeerAccess(_ _) cuMemGetInfo_v2(_ _)
            cuGetErrorName(_ _) cuGetErrorString(_ _);
        stream:
            cuStreamCreate(_ _) cuStreamDestroy_v2(_) cuStreamGetCtx(_ _) cuStreamSynchronize(_)
            cuStreamQuery(_) cuStreamWaitEvent(_ _ _) cuEventCreate(_ _) cuEventDestroy_v2(_)
            cuEventRecord(_ _) cuEventQuery(_) cuEventSynchronize(_)
            cuMemcpyHtoDAsync_v2(_ _ _ _) cuMemcpyDtoHAsync_v2(_ _ _ _)
            cuMemcpyDtoDAsync_v2(_ _ _ _) cuMemcpy2DAsync_v2(_ _) cuMemsetD8Async(_ _ _ _) cuMemsetD32Async(_ _ _ _)
            cuStreamWriteValue32_v2(_ _ _ _) cuStreamWaitValue32_v2(_ _ _ _);
        memory:
            cuMemAlloc_v2(_ _) cuMemFree_v2(_) cuMemHostAlloc(_ _ _) cuMemFreeHost(_)
            cuMemHostGetDevicePointer_v2(_ _ _);
        module:
            cuModuleLoadData(_ _) cuModuleLoadDataEx(_ _ _ _ _) cuModuleUnload(_)
            cuModuleGetFunction(_ _ _) cuFuncLoad(_) cuFuncGetParamInfo(_ _ _ _)
            cuFuncGetAttribute(_ _ _)
            cuOccupancyMaxActiveBlocksPerMultiprocessor(_ _ _ _)
            cuLaunchKernel(_ _ _ _ _ _ _ _ _ _ _);
        graph:
            cuStreamBeginCapture_v2(_ _) cuStreamEndCapture(_ _) cuStreamIsCapturing(_ _)
            cuGraphInstantiateWithFlags(_ _ _) cuGraphUpload(_ _) cuGraphLaunch(_ _)
            cuGraphExecDestroy(_) cuGraphDestroy(_);
        vmm:
            cuMemGetAllocationGranularity(_ _ _) cuMemCreate(_ _ _ _) cuMemRelease(_)
            cuMemGetAllocationPropertiesFromHandle(_ _) cuMemAddressReserve(_ _ _ _ _)
            cuMemAddressFree(_ _) cuMemMap(_ _ _ _ _) cuMemUnmap(_ _) cuMemSetAccess(_ _ _ _)
            cuMemExportToShareableHandle(_ _ _ _) cuMemImportFromShareableHandle(_ _ _);
        multicast:
            cuMulticastGetGranularity(_ _ _) cuMulticastCreate(_ _) cuMulticastAddDevice(_ _)
            cuMulticastBindMem(_ _ _ _ _ _) cuMulticastBindAddr(_ _ _ _ _)
            cuMulticastUnbind(_ _ _ _);
    }
}

#[test]
fn structures_have_the_header_s_shape() {
    use crate::abi::{AccessDesc, AllocationProp, Copy2d, End2d, MulticastProp};
    use core::mem::offset_of;
    assert_eq!(
        size_of::<AllocationProp>(),
        size_of::<nvidia::CUmemAllocationProp>()
    );
    assert_eq!(
        size_of::<AccessDesc>(),
        size_of::<nvidia::CUmemAccessDesc>()
    );
    assert_eq!(
        size_of::<MulticastProp>(),
        size_of::<nvidia::CUmulticastObjectProp>()
    );
    assert_eq!(size_of::<Copy2d>(), size_of::<nvidia::CUDA_MEMCPY2D>());
    assert_eq!(
        [
            offset_of!(Copy2d, from) + offset_of!(End2d, kind),
            offset_of!(Copy2d, from) + offset_of!(End2d, device),
            offset_of!(Copy2d, from) + offset_of!(End2d, pitch),
            offset_of!(Copy2d, to) + offset_of!(End2d, kind),
            offset_of!(Copy2d, to) + offset_of!(End2d, device),
            offset_of!(Copy2d, to) + offset_of!(End2d, pitch),
            offset_of!(Copy2d, width),
            offset_of!(Copy2d, height),
        ],
        [
            offset_of!(nvidia::CUDA_MEMCPY2D, srcMemoryType),
            offset_of!(nvidia::CUDA_MEMCPY2D, srcDevice),
            offset_of!(nvidia::CUDA_MEMCPY2D, srcPitch),
            offset_of!(nvidia::CUDA_MEMCPY2D, dstMemoryType),
            offset_of!(nvidia::CUDA_MEMCPY2D, dstDevice),
            offset_of!(nvidia::CUDA_MEMCPY2D, dstPitch),
            offset_of!(nvidia::CUDA_MEMCPY2D, WidthInBytes),
            offset_of!(nvidia::CUDA_MEMCPY2D, Height),
        ]
    );
    assert_eq!(
        [
            offset_of!(AllocationProp, kind),
            offset_of!(AllocationProp, handle_types),
            offset_of!(AllocationProp, location),
            offset_of!(AllocationProp, win32),
            offset_of!(AllocationProp, compression),
        ],
        [
            offset_of!(nvidia::CUmemAllocationProp, type_),
            offset_of!(nvidia::CUmemAllocationProp, requestedHandleTypes),
            offset_of!(nvidia::CUmemAllocationProp, location),
            offset_of!(nvidia::CUmemAllocationProp, win32HandleMetaData),
            offset_of!(nvidia::CUmemAllocationProp, allocFlags),
        ]
    );
    assert_eq!(
        [
            offset_of!(MulticastProp, devices),
            offset_of!(MulticastProp, size),
            offset_of!(MulticastProp, handle_types),
            offset_of!(MulticastProp, flags),
        ],
        [
            offset_of!(nvidia::CUmulticastObjectProp, numDevices),
            offset_of!(nvidia::CUmulticastObjectProp, size),
            offset_of!(nvidia::CUmulticastObjectProp, handleTypes),
            offset_of!(nvidia::CUmulticastObjectProp, flags),
        ]
    );
}

#[test]
fn codes_have_the_header_s_values() {
    use crate::code::name;
    use nvidia::CUresult;
    let codes = [
        CUresult::CUDA_ERROR_INVALID_VALUE,
        CUresult::CUDA_ERROR_OUT_OF_MEMORY,
        CUresult::CUDA_ERROR_INVALID_CONTEXT,
        CUresult::CUDA_ERROR_INVALID_PTX,
        CUresult::CUDA_ERROR_INVALID_HANDLE,
        CUresult::CUDA_ERROR_ILLEGAL_STATE,
        CUresult::CUDA_ERROR_NOT_FOUND,
        CUresult::CUDA_ERROR_NOT_READY,
        CUresult::CUDA_ERROR_ILLEGAL_ADDRESS,
        CUresult::CUDA_ERROR_NOT_PERMITTED,
        CUresult::CUDA_ERROR_NOT_SUPPORTED,
        CUresult::CUDA_ERROR_SYSTEM_NOT_READY,
        CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
        CUresult::CUDA_ERROR_STREAM_CAPTURE_ISOLATION,
        CUresult::CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD,
    ];
    for code in codes {
        let text = name(code as i32)
            .expect("a known code")
            .to_str()
            .expect("ASCII");
        assert_eq!(text, format!("{code:?}"));
    }
}
