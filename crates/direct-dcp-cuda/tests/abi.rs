//! Sizes, alignments, offsets and values of `sys` against types generated from NVIDIA's header.
//! Function types are compared in `src/driver/table/shape.rs`.

use core::mem::offset_of;

use cudarc::driver::sys as nvidia;
use direct_dcp_cuda::{DeviceAttribute, sys};

macro_rules! same_struct {
    ($ours:ident { $($our:ident = $their:ident),* } $theirs:ident) => {
        assert_eq!(size_of::<sys::$ours>(), size_of::<nvidia::$theirs>(), stringify!($ours));
        assert_eq!(align_of::<sys::$ours>(), align_of::<nvidia::$theirs>(), stringify!($ours));
        $(assert_eq!(
            offset_of!(sys::$ours, $our), offset_of!(nvidia::$theirs, $their),
            concat!(stringify!($ours), ".", stringify!($our))
        );)*
    };
}

#[test]
fn structures() {
    same_struct!(CUuuid { bytes = bytes } CUuuid_st);
    same_struct!(CUmemLocation { kind = type_, id = id } CUmemLocation_st);
    same_struct!(CUmemAllocationProp {
        kind = type_,
        requested_handle_types = requestedHandleTypes,
        location = location,
        win32_handle_meta_data = win32HandleMetaData,
        alloc_flags = allocFlags
    } CUmemAllocationProp_st);
    same_struct!(CUmemAllocationFlags {
        compression_type = compressionType,
        gpu_direct_rdma_capable = gpuDirectRDMACapable,
        usage = usage,
        reserved = reserved
    } CUmemAllocationProp_st__bindgen_ty_1);
    same_struct!(CUmemAccessDesc { location = location, flags = flags } CUmemAccessDesc_st);
    same_struct!(CUmemFabricHandle { data = data } CUmemFabricHandle_st);
    same_struct!(CUmulticastObjectProp {
        num_devices = numDevices,
        size = size,
        handle_types = handleTypes,
        flags = flags
    } CUmulticastObjectProp_st);
    same_struct!(CUDA_MEMCPY2D {
        src_x_in_bytes = srcXInBytes,
        src_y = srcY,
        src_memory_type = srcMemoryType,
        src_host = srcHost,
        src_device = srcDevice,
        src_array = srcArray,
        src_pitch = srcPitch,
        dst_x_in_bytes = dstXInBytes,
        dst_y = dstY,
        dst_memory_type = dstMemoryType,
        dst_host = dstHost,
        dst_device = dstDevice,
        dst_array = dstArray,
        dst_pitch = dstPitch,
        width_in_bytes = WidthInBytes,
        height = Height
    } CUDA_MEMCPY2D_st);
    assert_eq!(size_of::<sys::CUdevice>(), size_of::<nvidia::CUdevice>());
    assert_eq!(
        size_of::<sys::CUdeviceptr>(),
        size_of::<nvidia::CUdeviceptr>()
    );
    assert_eq!(size_of::<sys::CUresult>(), size_of::<nvidia::CUresult>());
    assert_eq!(size_of::<sys::CUstream>(), size_of::<nvidia::CUstream>());
    assert_eq!(
        size_of::<sys::CUmemGenericAllocationHandle>(),
        size_of::<nvidia::CUmemGenericAllocationHandle>()
    );
}

macro_rules! same_values {
    ($($enumeration:ident: $($name:ident)*;)*) => {
        $($(assert_eq!(
            i64::from(sys::$name), nvidia::$enumeration::$name as i64, stringify!($name)
        );)*)*
    };
}

#[test]
fn values() {
    same_values! {
        cudaError_enum: CUDA_SUCCESS CUDA_ERROR_INVALID_VALUE CUDA_ERROR_OUT_OF_MEMORY
            CUDA_ERROR_NO_DEVICE CUDA_ERROR_NOT_READY CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED
            CUDA_ERROR_NOT_PERMITTED CUDA_ERROR_NOT_SUPPORTED CUDA_ERROR_SYSTEM_NOT_READY;
        CUdevice_P2PAttribute_enum: CU_DEVICE_P2P_ATTRIBUTE_PERFORMANCE_RANK
            CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED
            CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED;
        CUstream_flags_enum: CU_STREAM_NON_BLOCKING;
        CUevent_flags_enum: CU_EVENT_DEFAULT CU_EVENT_DISABLE_TIMING;
        CUmemAllocationType_enum: CU_MEM_ALLOCATION_TYPE_PINNED;
        CUmemorytype_enum: CU_MEMORYTYPE_UNIFIED;
        CUmemLocationType_enum: CU_MEM_LOCATION_TYPE_DEVICE;
        CUmemAccess_flags_enum: CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
        CUmemAllocationGranularity_flags_enum: CU_MEM_ALLOC_GRANULARITY_MINIMUM
            CU_MEM_ALLOC_GRANULARITY_RECOMMENDED;
        CUjit_option_enum: CU_JIT_INFO_LOG_BUFFER CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES
            CU_JIT_ERROR_LOG_BUFFER CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES;
        CUfunction_attribute_enum: CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK
            CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES
            CU_FUNC_ATTRIBUTE_NUM_REGS CU_FUNC_ATTRIBUTE_PTX_VERSION
            CU_FUNC_ATTRIBUTE_BINARY_VERSION;
        CUstreamCaptureMode_enum: CU_STREAM_CAPTURE_MODE_GLOBAL
            CU_STREAM_CAPTURE_MODE_THREAD_LOCAL CU_STREAM_CAPTURE_MODE_RELAXED;
        CUstreamCaptureStatus_enum: CU_STREAM_CAPTURE_STATUS_NONE CU_STREAM_CAPTURE_STATUS_ACTIVE
            CU_STREAM_CAPTURE_STATUS_INVALIDATED;
        CUstreamWaitValue_flags_enum: CU_STREAM_WAIT_VALUE_GEQ CU_STREAM_WAIT_VALUE_EQ;
        CUstreamWriteValue_flags_enum: CU_STREAM_WRITE_VALUE_DEFAULT;
    }
    use nvidia::CUmemAllocationHandleType_enum as HandleType;
    use nvidia::CUmulticastGranularity_flags_enum as Granularity;
    assert_eq!(
        sys::CU_MEM_HANDLE_TYPE_NONE,
        HandleType::CU_MEM_HANDLE_TYPE_NONE.0
    );
    assert_eq!(
        sys::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
        HandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR.0
    );
    assert_eq!(
        sys::CU_MEM_HANDLE_TYPE_FABRIC,
        HandleType::CU_MEM_HANDLE_TYPE_FABRIC.0
    );
    assert_eq!(
        [
            sys::CU_MEM_ALLOC_GRANULARITY_MINIMUM,
            sys::CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        ],
        [
            Granularity::CU_MULTICAST_GRANULARITY_MINIMUM as u32,
            Granularity::CU_MULTICAST_GRANULARITY_RECOMMENDED as u32
        ]
    );
    assert_eq!(
        sys::CU_MEMHOSTALLOC_PORTABLE,
        nvidia::CU_MEMHOSTALLOC_PORTABLE
    );
    assert_eq!(
        sys::CU_MEMHOSTALLOC_DEVICEMAP,
        nvidia::CU_MEMHOSTALLOC_DEVICEMAP
    );
}

#[test]
fn device_attributes() {
    use nvidia::CUdevice_attribute_enum as Theirs;
    let pairs = [
        (
            DeviceAttribute::MaxThreadsPerBlock,
            Theirs::CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK,
        ),
        (
            DeviceAttribute::MaxSharedMemoryPerBlock,
            Theirs::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK,
        ),
        (
            DeviceAttribute::MultiprocessorCount,
            Theirs::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT,
        ),
        (
            DeviceAttribute::UnifiedAddressing,
            Theirs::CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING,
        ),
        (
            DeviceAttribute::MaxThreadsPerMultiprocessor,
            Theirs::CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR,
        ),
        (
            DeviceAttribute::ComputeCapabilityMajor,
            Theirs::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
        ),
        (
            DeviceAttribute::ComputeCapabilityMinor,
            Theirs::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
        ),
        (
            DeviceAttribute::HostNativeAtomicSupported,
            Theirs::CU_DEVICE_ATTRIBUTE_HOST_NATIVE_ATOMIC_SUPPORTED,
        ),
        (
            DeviceAttribute::CanUseHostPointerForRegisteredMem,
            Theirs::CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM,
        ),
        (
            DeviceAttribute::VirtualMemoryManagementSupported,
            Theirs::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
        ),
        (
            DeviceAttribute::HandleTypePosixFileDescriptorSupported,
            Theirs::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
        ),
        (
            DeviceAttribute::HandleTypeFabricSupported,
            Theirs::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED,
        ),
        (
            DeviceAttribute::MulticastSupported,
            Theirs::CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED,
        ),
    ];
    for (ours, theirs) in pairs {
        assert_eq!(ours as u32, theirs as u32, "{ours:?}");
    }
}
