//! Result codes and their texts.

use core::ffi::{CStr, c_int};

/// A `CUresult` other than success.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Code(pub(crate) c_int);

/// What an API body returns.
pub(crate) type Outcome<T = ()> = Result<T, Code>;

macro_rules! codes {
    ($($name:ident = $value:literal;)*) => {
        #[allow(dead_code)] // the list is complete, not minimal
        impl Code {
            $(pub(crate) const $name: Self = Self($value);)*
        }

        /// The header's name of a code.
        pub(crate) fn name(code: c_int) -> Option<&'static CStr> {
            let text: &'static str = match code {
                0 => "CUDA_SUCCESS\0",
                $($value => concat!("CUDA_ERROR_", stringify!($name), "\0"),)*
                _ => return None,
            };
            CStr::from_bytes_with_nul(text.as_bytes()).ok()
        }
    };
}

codes! {
    INVALID_VALUE = 1;
    OUT_OF_MEMORY = 2;
    NOT_INITIALIZED = 3;
    NO_DEVICE = 100;
    INVALID_DEVICE = 101;
    INVALID_CONTEXT = 201;
    ALREADY_MAPPED = 208;
    NO_BINARY_FOR_GPU = 209;
    NOT_MAPPED = 211;
    INVALID_PTX = 218;
    OPERATING_SYSTEM = 304;
    INVALID_HANDLE = 400;
    ILLEGAL_STATE = 401;
    NOT_FOUND = 500;
    NOT_READY = 600;
    ILLEGAL_ADDRESS = 700;
    PEER_ACCESS_ALREADY_ENABLED = 704;
    CONTEXT_IS_DESTROYED = 709;
    LAUNCH_FAILED = 719;
    NOT_PERMITTED = 800;
    NOT_SUPPORTED = 801;
    SYSTEM_NOT_READY = 802;
    STREAM_CAPTURE_UNSUPPORTED = 900;
    STREAM_CAPTURE_INVALIDATED = 901;
    STREAM_CAPTURE_MERGE = 902;
    STREAM_CAPTURE_UNMATCHED = 903;
    STREAM_CAPTURE_UNJOINED = 904;
    STREAM_CAPTURE_ISOLATION = 905;
    STREAM_CAPTURE_IMPLICIT = 906;
    CAPTURED_EVENT = 907;
    STREAM_CAPTURE_WRONG_THREAD = 908;
    UNKNOWN = 999;
}

/// Ends a body with a code unless the condition holds.
pub(crate) fn ensure(condition: bool, otherwise: Code) -> Outcome {
    if condition { Ok(()) } else { Err(otherwise) }
}
