//! Compares every function type of the table with NVIDIA's declaration, as `cudarc` generated it:
//! as many arguments, each of the same size and alignment, in the same order.

use cudarc::driver::sys as nvidia;

use super::Table;

/// Size and alignment of each argument.
trait Shape {
    fn shape() -> Vec<(usize, usize)>;
}

macro_rules! shapes {
    ($(($($arg:ident)*))*) => {$(
        impl<Result, $($arg),*> Shape for unsafe fn($($arg),*) -> Result {
            fn shape() -> Vec<(usize, usize)> {
                vec![$((size_of::<$arg>(), align_of::<$arg>())),*]
            }
        }
        impl<Result, $($arg),*> Shape for unsafe extern "C" fn($($arg),*) -> Result {
            fn shape() -> Vec<(usize, usize)> {
                vec![$((size_of::<$arg>(), align_of::<$arg>())),*]
            }
        }
    )*};
}

shapes! { () (A) (A B) (A B C) (A B C D) (A B C D E) (A B C D E F) (A B C D E F G H I J K) }

fn ours<F: Shape>(_: Option<F>) -> Vec<(usize, usize)> {
    F::shape()
}

fn theirs<F: Shape>(_: F) -> Vec<(usize, usize)> {
    F::shape()
}

macro_rules! same {
    ($table:ident; $($name:ident($($any:tt)*))*) => {{
        let mut compared = Vec::new();
        $(
            let function: unsafe fn($($any),*) -> _ = nvidia::$name;
            assert_eq!(ours($table.$name), theirs(function), stringify!($name));
            compared.push(stringify!($name));
        )*
        compared
    }};
}

#[test]
fn functions_have_the_header_s_shape() {
    let table = Table::empty();
    let mut compared = same! { table;
        cuInit(_) cuDriverGetVersion(_) cuGetErrorName(_ _) cuGetErrorString(_ _)
        cuDeviceGet(_ _) cuDeviceGetCount(_) cuDeviceGetName(_ _ _) cuDeviceGetUuid_v2(_ _)
        cuDeviceGetPCIBusId(_ _ _) cuDeviceGetAttribute(_ _ _) cuDeviceTotalMem_v2(_ _)
        cuDeviceCanAccessPeer(_ _ _) cuDeviceGetP2PAttribute(_ _ _ _)
        cuDevicePrimaryCtxRetain(_ _) cuDevicePrimaryCtxRelease_v2(_)
        cuCtxPushCurrent_v2(_) cuCtxPopCurrent_v2(_) cuCtxGetCurrent(_) cuCtxSynchronize()
        cuCtxEnablePeerAccess(_ _)
        cuStreamCreate(_ _) cuStreamDestroy_v2(_) cuStreamGetCtx(_ _) cuStreamSynchronize(_)
        cuStreamQuery(_) cuStreamWaitEvent(_ _ _)
        cuEventCreate(_ _) cuEventDestroy_v2(_) cuEventRecord(_ _) cuEventQuery(_)
        cuEventSynchronize(_)
        cuMemGetInfo_v2(_ _) cuMemAlloc_v2(_ _) cuMemFree_v2(_) cuMemHostAlloc(_ _ _)
        cuMemFreeHost(_) cuMemHostGetDevicePointer_v2(_ _ _)
        cuMemcpyHtoDAsync_v2(_ _ _ _) cuMemcpyDtoHAsync_v2(_ _ _ _)
        cuMemcpyDtoDAsync_v2(_ _ _ _) cuMemcpy2DAsync_v2(_ _) cuMemsetD8Async(_ _ _ _) cuMemsetD32Async(_ _ _ _)
        cuModuleLoadDataEx(_ _ _ _ _) cuModuleUnload(_) cuModuleGetFunction(_ _ _)
        cuFuncGetAttribute(_ _ _) cuFuncLoad(_) cuFuncGetParamInfo(_ _ _ _)
        cuLaunchKernel(_ _ _ _ _ _ _ _ _ _ _)
        cuOccupancyMaxActiveBlocksPerMultiprocessor(_ _ _ _)
        cuStreamBeginCapture_v2(_ _) cuStreamEndCapture(_ _) cuStreamIsCapturing(_ _)
        cuGraphInstantiateWithFlags(_ _ _) cuGraphUpload(_ _) cuGraphLaunch(_ _)
        cuGraphExecDestroy(_) cuGraphDestroy(_)
        cuStreamWriteValue32_v2(_ _ _ _) cuStreamWaitValue32_v2(_ _ _ _)
        cuMemGetAllocationGranularity(_ _ _) cuMemCreate(_ _ _ _) cuMemRelease(_)
        cuMemAddressReserve(_ _ _ _ _) cuMemAddressFree(_ _) cuMemMap(_ _ _ _ _) cuMemUnmap(_ _)
        cuMemSetAccess(_ _ _ _) cuMemGetAllocationPropertiesFromHandle(_ _)
        cuMemExportToShareableHandle(_ _ _ _) cuMemImportFromShareableHandle(_ _ _)
        cuMulticastGetGranularity(_ _ _) cuMulticastCreate(_ _) cuMulticastAddDevice(_ _)
        cuMulticastBindMem(_ _ _ _ _ _) cuMulticastBindAddr(_ _ _ _ _)
        cuMulticastUnbind(_ _ _ _)
    };
    // The header of CUDA 13 knows the second version only; the driver exports both, of one shape.
    let elapsed: unsafe fn(_, _, _) -> _ = nvidia::cuEventElapsedTime_v2;
    assert_eq!(ours(table.cuEventElapsedTime), theirs(elapsed));
    compared.push("cuEventElapsedTime");

    let mut declared: Vec<_> = table
        .inventory()
        .into_iter()
        .map(|(_, name, _)| name)
        .collect();
    declared.sort_unstable();
    compared.sort_unstable();
    assert_eq!(
        compared, declared,
        "every function of the table is compared"
    );
}
