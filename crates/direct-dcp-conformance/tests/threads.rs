//! Ranks as threads.

direct_dcp_conformance::conformance!(direct_dcp_conformance::backends::Threads);
