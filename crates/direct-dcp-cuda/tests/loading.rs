//! Opening the driver: none, one that is no driver, one that fails, the variable.

mod common;

use std::path::Path;

use common::{Watchdog, child, expect_passed, fake};
use direct_dcp_cuda::{CudaError, Device, Driver, LIBRARY_VARIABLE, SymbolGroup};

fn one_clear_line(error: &CudaError) -> String {
    let text = error.to_string();
    assert!(!text.contains('\n'), "{text:?}");
    assert!(text.len() > 20, "{text:?}");
    text
}

#[test]
fn no_library_is_one_clear_error() {
    let error = Driver::open(Path::new("/nonexistent/libcuda.so.1")).expect_err("no such file");
    let text = one_clear_line(&error);
    assert!(matches!(error, CudaError::LibraryMissing { .. }));
    assert!(text.contains("no NVIDIA driver") && text.contains("/nonexistent/libcuda.so.1"));
    assert!(error.is_unsupported());
}

/// On a machine with a driver this loads it; on one without it says so. It never panics, and it can
/// be tried again.
#[test]
fn the_system_s_driver_or_a_clear_error() {
    for _ in 0..2 {
        match Driver::load() {
            Ok(driver) => assert!(driver.version() > 0),
            Err(error @ CudaError::LibraryMissing { .. }) => {
                let text = one_clear_line(&error);
                assert!(
                    text.contains("libcuda.so.1") && text.contains("libcuda.so:"),
                    "{text}"
                );
            }
            Err(error) => drop(one_clear_line(&error)),
        }
    }
}

#[test]
fn a_library_that_is_no_driver() {
    let error = Driver::open(Path::new("libc.so.6")).expect_err("not a driver");
    assert!(one_clear_line(&error).contains("cuInit"));
    assert!(
        matches!(
            error,
            CudaError::SymbolMissing {
                symbol: "cuInit",
                ..
            }
        ),
        "{error:?}"
    );
}

#[test]
fn the_variable_names_the_file_and_success_is_remembered() {
    if std::env::var_os(LIBRARY_VARIABLE).is_some() {
        let first = Driver::load().expect("the fake driver");
        let second = Driver::load().expect("the fake driver");
        assert!(std::sync::Arc::ptr_eq(&first, &second));
        assert_eq!(first.version(), 13_000);
        for report in first.symbols() {
            assert!(report.is_available(), "{report:?}");
        }
        assert!(SymbolGroup::ALL.iter().all(|group| first.has(*group)));
        return;
    }
    let _watchdog = Watchdog::new(60);
    let path = fake().path().to_str().expect("a path");
    let test = "the_variable_names_the_file_and_success_is_remembered";
    expect_passed(child(test, LIBRARY_VARIABLE, path));
}

#[test]
fn a_driver_without_devices_can_be_tried_again() {
    let variable = "DIRECT_DCP_FAKE_DEVICES";
    if std::env::var_os(variable).is_some() {
        for _ in 0..2 {
            let error = Driver::open(fake().path()).expect_err("no device");
            assert_eq!(error.code(), Some(100));
            assert!(one_clear_line(&error).contains("CUDA_ERROR_NO_DEVICE"));
            assert!(error.is_unsupported());
        }
        return;
    }
    let _watchdog = Watchdog::new(60);
    let test = "a_driver_without_devices_can_be_tried_again";
    expect_passed(child(test, variable, "0"));
}

#[test]
fn the_environment_makes_a_call_fail() {
    let variable = "DIRECT_DCP_FAKE_FAIL";
    if std::env::var_os(variable).is_some() {
        let driver = Driver::open(fake().path()).expect("the fake driver");
        assert_eq!(Device::count(&driver), Ok(2));
        let error = Device::count(&driver).expect_err("the planned failure");
        let expected = "cuDeviceGetCount failed: CUDA_ERROR_OUT_OF_MEMORY (2): ";
        assert!(error.to_string().starts_with(expected), "{error}");
        assert_eq!(Device::count(&driver), Ok(2));
        return;
    }
    let _watchdog = Watchdog::new(60);
    let test = "the_environment_makes_a_call_fail";
    expect_passed(child(test, variable, "cuDeviceGetCount:2:2"));
}
