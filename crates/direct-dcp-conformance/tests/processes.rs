//! Ranks as processes.

direct_dcp_conformance::conformance!(direct_dcp_conformance::backends::Processes::of(env!(
    "CARGO_BIN_EXE_rank"
)));
