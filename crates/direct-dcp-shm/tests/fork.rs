//! A forked process finds out that it is one.
#![allow(unsafe_code)] // forks

use direct_dcp_shm::forks;

#[test]
fn only_the_forked_process_counts_a_fork() {
    let before = forks();
    // SAFETY: the child only reads an atomic, and ends without running anything else of ours.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let forked = forks() == before + 1;
        // SAFETY: ends the process at once.
        unsafe { libc::_exit(i32::from(!forked)) };
    }
    let mut status = -1;
    // SAFETY: writes one integer to a place that lives through the call.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    assert_eq!(status, 0, "the child counted no fork");
    assert_eq!(forks(), before);
}
