//! Rendezvous in a directory: who is let in, what is replaced, what is left.

mod common;

use common::{later, noise, private_dir, soon, within_patience};
use direct_dcp_shm::ShmError;
use direct_dcp_shm::rendezvous::{Listener, connect};
use std::fs::{self, Permissions};
use std::os::unix::fs::{FileTypeExt, PermissionsExt, symlink};
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

fn is_socket(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|file| file.file_type().is_socket())
}

/// Checks that a listener in `dir` and a connection to it reach each other.
fn meets(listener: &Listener, dir: &Path, rank: u32) {
    let theirs = connect(dir, rank, later()).unwrap();
    let ours = listener.accept(later()).unwrap();
    let message = noise(1_000);
    theirs.send(&message, None, later()).unwrap();
    assert_eq!(ours.recv(later()).unwrap().0, message);
    ours.send(&message, None, later()).unwrap();
    assert_eq!(theirs.recv(later()).unwrap().0, message);
    assert_eq!(ours.peer().unwrap().pid, std::process::id());
}

#[test]
fn ranks_meet_and_nothing_is_left() {
    within_patience(|| {
        let dir = private_dir();
        let listeners: Vec<_> = (0..3)
            .map(|rank| Listener::bind(dir.path(), rank).unwrap())
            .collect();
        for (listener, rank) in listeners.iter().zip(0..) {
            assert!(is_socket(&dir.path().join(format!("rank-{rank}.sock"))));
            meets(listener, dir.path(), rank);
        }
        drop(listeners);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    });
}

#[test]
fn connecting_waits_for_the_listener() {
    within_patience(|| {
        let dir = private_dir();
        thread::scope(|scope| {
            let early = scope.spawn(|| connect(dir.path(), 7, later()).unwrap());
            thread::sleep(Duration::from_millis(50));
            let listener = Listener::bind(dir.path(), 7).unwrap();
            let ours = listener.accept(later()).unwrap();
            let theirs = early.join().unwrap();
            ours.send(b"welcome", None, later()).unwrap();
            assert_eq!(theirs.recv(later()).unwrap().0, b"welcome");
        });
    });
}

#[test]
fn deadlines_are_kept() {
    within_patience(|| {
        let dir = private_dir();
        let deadline = soon();
        let error = connect(dir.path(), 0, deadline).unwrap_err();
        assert!(matches!(error, ShmError::TimedOut), "{error}");
        assert!(Instant::now() >= deadline);
        let listener = Listener::bind(dir.path(), 0).unwrap();
        let deadline = soon();
        let error = listener.accept(deadline).unwrap_err();
        assert!(matches!(error, ShmError::TimedOut), "{error}");
        assert!(Instant::now() >= deadline);
    });
}

#[test]
fn a_directory_that_others_can_enter_is_refused() {
    within_patience(|| {
        let dir = private_dir();
        for bits in [0o755, 0o701, 0o710, 0o777, 0o720] {
            fs::set_permissions(dir.path(), Permissions::from_mode(bits)).unwrap();
            for error in [
                Listener::bind(dir.path(), 0).unwrap_err(),
                connect(dir.path(), 0, later()).unwrap_err(),
            ] {
                let text = error.to_string();
                assert!(
                    matches!(&error, ShmError::OpenDirectory { path, mode }
                        if path == dir.path() && *mode == bits),
                    "{text}"
                );
                assert!(text.contains(&format!("{bits:04o}")), "{text}");
                assert!(text.contains(dir.path().to_str().unwrap()), "{text}");
            }
        }
        fs::set_permissions(dir.path(), Permissions::from_mode(0o700)).unwrap();
        meets(&Listener::bind(dir.path(), 0).unwrap(), dir.path(), 0);
    });
}

#[test]
fn what_is_no_directory_of_ours_is_refused() {
    within_patience(|| {
        let dir = private_dir();
        let private = dir.path().join("private");
        fs::create_dir(&private).unwrap();
        fs::set_permissions(&private, Permissions::from_mode(0o700)).unwrap();
        let link = dir.path().join("link");
        symlink(&private, &link).unwrap();
        let file = dir.path().join("file");
        fs::write(&file, noise(3)).unwrap();
        for path in [link.clone(), link.join(""), file] {
            let error = Listener::bind(&path, 0).unwrap_err();
            assert!(matches!(error, ShmError::NotADirectory { .. }), "{error}");
            let error = connect(&path, 0, later()).unwrap_err();
            assert!(matches!(error, ShmError::NotADirectory { .. }), "{error}");
        }
        let error = Listener::bind(&dir.path().join("missing"), 0).unwrap_err();
        assert!(
            matches!(error, ShmError::Io { call: "open", .. }),
            "{error}"
        );

        // Whoever runs the tests, one of these is somebody else's.
        let us = rustix::process::geteuid().as_raw();
        if us != 0 {
            let error = Listener::bind(Path::new("/"), 0).unwrap_err();
            assert!(
                matches!(error, ShmError::ForeignDirectory { owner: 0, us: seen, .. } if seen == us),
                "{error}"
            );
        } else {
            std::os::unix::fs::chown(&private, Some(12_345), None).unwrap();
            let error = Listener::bind(&private, 0).unwrap_err();
            assert!(
                matches!(
                    error,
                    ShmError::ForeignDirectory {
                        owner: 12_345,
                        us: 0,
                        ..
                    }
                ),
                "{error}"
            );
        }
    });
}

#[test]
fn a_stale_socket_is_replaced_and_connected_to() {
    within_patience(|| {
        let dir = private_dir();
        let path = dir.path().join("rank-4.sock");
        // A socket file outlives its socket, as after a kill.
        drop(UnixDatagram::bind(&path).unwrap());
        assert!(is_socket(&path));
        thread::scope(|scope| {
            let early = scope.spawn(|| connect(dir.path(), 4, later()).unwrap());
            thread::sleep(Duration::from_millis(20));
            let listener = Listener::bind(dir.path(), 4).unwrap();
            listener.accept(later()).unwrap();
            early.join().unwrap();
            meets(&listener, dir.path(), 4);
        });
        assert!(!path.exists());
    });
}

#[test]
fn of_many_that_replace_one_stale_socket_one_wins() {
    within_patience(|| {
        let dir = private_dir();
        let start = Barrier::new(4);
        for _ in 0..300 {
            drop(UnixDatagram::bind(dir.path().join("rank-0.sock")).unwrap());
            let results: Vec<_> = thread::scope(|scope| {
                let bids: Vec<_> = (0..4)
                    .map(|_| {
                        scope.spawn(|| {
                            start.wait();
                            Listener::bind(dir.path(), 0)
                        })
                    })
                    .collect();
                bids.into_iter().map(|bid| bid.join().unwrap()).collect()
            });
            let (won, lost): (Vec<_>, Vec<_>) = results.into_iter().partition(Result::is_ok);
            assert_eq!(won.len(), 1);
            for error in lost {
                let error = error.unwrap_err();
                assert!(
                    matches!(error, ShmError::RankTaken { rank: 0, .. }),
                    "{error}"
                );
            }
            meets(won[0].as_ref().unwrap(), dir.path(), 0);
        }
    });
}

#[test]
fn a_living_listener_is_neither_replaced_nor_disturbed() {
    within_patience(|| {
        let dir = private_dir();
        let listener = Listener::bind(dir.path(), 2).unwrap();
        let error = Listener::bind(dir.path(), 2).unwrap_err();
        assert!(
            matches!(error, ShmError::RankTaken { rank: 2, .. }),
            "{error}"
        );
        // The attempt was not taken for a connection.
        let error = listener.accept(soon()).unwrap_err();
        assert!(matches!(error, ShmError::TimedOut), "{error}");
        meets(&listener, dir.path(), 2);
    });
}

#[test]
fn a_file_in_the_way_is_kept() {
    within_patience(|| {
        let dir = private_dir();
        let path = dir.path().join("rank-0.sock");
        let bytes = noise(10);
        fs::write(&path, &bytes).unwrap();
        let error = Listener::bind(dir.path(), 0).unwrap_err();
        assert!(
            matches!(&error, ShmError::NotASocket { path: named } if *named == path),
            "{error}"
        );
        assert_eq!(fs::read(&path).unwrap(), bytes);
    });
}

#[test]
fn a_successors_socket_is_kept() {
    within_patience(|| {
        let dir = private_dir();
        let path = dir.path().join("rank-0.sock");
        let first = Listener::bind(dir.path(), 0).unwrap();
        fs::remove_file(&path).unwrap();
        let second = Listener::bind(dir.path(), 0).unwrap();
        drop(first);
        meets(&second, dir.path(), 0);
    });
}

#[test]
fn long_paths_work() {
    within_patience(|| {
        let dir = private_dir();
        let mut long = dir.path().to_path_buf();
        for _ in 0..5 {
            long.push("a-name-of-sixty-letters-that-makes-a-path-too-long-for-a-socket");
            fs::create_dir(&long).unwrap();
            fs::set_permissions(&long, Permissions::from_mode(0o700)).unwrap();
        }
        assert!(long.as_os_str().len() > 300);
        meets(&Listener::bind(&long, u32::MAX).unwrap(), &long, u32::MAX);
    });
}
