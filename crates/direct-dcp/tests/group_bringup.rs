//! Bring-up with somebody who does not fit: an error that says so, never a hang.

mod group_common;

use direct_dcp::{Group, GroupError, Launcher};
use direct_dcp_shm::{Channel, SharedMemory, rendezvous};
use group_common::{Store, each, meeting_place, watched};
use std::fs::{File, Permissions};
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

const LONG: Duration = Duration::from_secs(30);
const SHORT: Duration = Duration::from_millis(200);

/// Two ends of a socket pair.
fn pair() -> (OwnedFd, OwnedFd) {
    let (ours, theirs) = Channel::pair().unwrap();
    (ours.into_fd(), theirs.into_fd())
}

/// Rank 0 of two, over one end; the other end is the test's.
fn against(theirs: impl FnOnce(OwnedFd) + Send + 'static) -> GroupError {
    watched(|| {
        let (ours, other) = pair();
        let peer = std::thread::spawn(|| theirs(other));
        let error = Group::from_sockets(0, vec![None, Some(ours)]).unwrap_err();
        peer.join().unwrap();
        error
    })
}

/// The message of a rank that greets with these numbers, in a version of the protocol.
fn hello(version: u16, world: u64, from: u64, to: u64) -> Vec<u8> {
    let mut bytes = b"dDCP".to_vec();
    bytes.extend(version.to_le_bytes());
    bytes.extend([1, 0]);
    for number in [1, 0, 24, 0, world, from, to] {
        bytes.extend(number.to_le_bytes());
    }
    bytes
}

/// Says one thing, and keeps the line open until the other side hangs up.
fn say(socket: OwnedFd, bytes: &[u8]) {
    let channel = Channel::from_fd(socket).unwrap();
    let until = Instant::now() + LONG;
    channel.send(bytes, None, until).unwrap();
    while channel.recv(until).is_ok() {}
}

#[test]
fn a_greeting_that_does_not_fit_is_a_mismatch() {
    for (greeting, word, theirs) in [
        (hello(1, 3, 1, 0), "world size", "3"),
        (hello(1, 2, 0, 0), "rank", "0"),
        (hello(1, 2, 1, 1), "idea of our rank", "1"),
        (hello(2, 2, 1, 0), "protocol", "version 2"),
        (b"GET / HTTP/1.1".to_vec(), "protocol", "something else"),
        (Vec::new(), "protocol", "0 bytes"),
    ] {
        let error = against(move |socket| say(socket, &greeting));
        match &error {
            GroupError::Mismatch {
                source: 1,
                field,
                theirs: value,
                ..
            } => {
                assert_eq!(*field, word);
                assert!(value.contains(theirs), "{value}");
            }
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn bytes_that_are_no_message_at_all_are_a_mismatch() {
    for size in [1, 7, 9, 40_000] {
        let error = against(move |socket| {
            let mut raw = File::from(socket);
            raw.write_all(&vec![0xa5; size]).unwrap();
        });
        assert!(
            matches!(error, GroupError::Mismatch { source: 1, .. }),
            "{error:?}"
        );
    }
}

#[test]
fn a_peer_that_hangs_up_is_lost() {
    let error = against(drop);
    assert!(matches!(error, GroupError::PeerLost { rank: 1 }), "{error}");
}

#[test]
fn descriptors_that_nobody_asked_for_are_closed() {
    let error = against(|socket| {
        let channel = Channel::from_fd(socket).unwrap();
        let memory = SharedMemory::create("unasked", 64).unwrap();
        let until = Instant::now() + LONG;
        channel
            .send(&hello(1, 2, 1, 0), Some(memory.fd()), until)
            .unwrap();
        channel.send(b"nonsense", None, until).unwrap();
        while channel.recv(until).is_ok() {}
    });
    assert!(
        matches!(error, GroupError::Mismatch { source: 1, .. }),
        "{error}"
    );
}

#[test]
fn sockets_must_be_one_for_each_peer() {
    let wrong = |rank, sockets: Vec<Option<OwnedFd>>| {
        let error = Group::from_sockets(rank, sockets).unwrap_err();
        assert!(
            matches!(error, GroupError::InvalidArgument { .. }),
            "{error}"
        );
        error.to_string()
    };
    assert!(wrong(0, vec![]).contains("at least two ranks"));
    assert!(wrong(0, vec![None]).contains("at least two ranks"));
    assert!(wrong(2, vec![Some(pair().0), None]).contains("from 0 to 1"));
    assert!(wrong(0, vec![None, None]).contains("none for rank 1"));
    assert!(wrong(1, vec![Some(pair().0), Some(pair().0)]).contains("own rank"));
    let file = File::open("/dev/null").unwrap().into();
    let error = Group::from_sockets(0, vec![None, Some(file)]).unwrap_err();
    assert!(error.to_string().contains("SOCK_SEQPACKET"), "{error}");
}

#[test]
fn a_directory_must_be_private() {
    let dir = meeting_place();
    for mode in [0o755, 0o777, 0o750] {
        std::fs::set_permissions(dir.path(), Permissions::from_mode(mode)).unwrap();
        let error = Group::directory(dir.path(), 0, 2, LONG).unwrap_err();
        assert!(error.to_string().contains("chmod 0700"), "{error}");
    }
    let nowhere = dir.path().join("nowhere");
    assert!(Group::directory(&nowhere, 0, 2, LONG).is_err());
}

#[test]
fn who_does_not_come_to_the_directory_is_named() {
    watched(|| {
        let dir = meeting_place();
        let errors = each(vec![1, 3], |rank| {
            Group::directory(dir.path(), rank, 5, SHORT).unwrap_err()
        });
        for error in errors {
            match error {
                GroupError::Timeout { missing, .. } => {
                    // Ranks 1 and 3 may or may not have met before they gave up.
                    for rank in [0, 2, 4] {
                        assert!(missing.contains(&rank), "{missing:?}");
                    }
                }
                GroupError::PeerLost { rank: 1 | 3 } => {}
                other => panic!("{other:?}"),
            }
        }
        assert_eq!(dir.path().read_dir().unwrap().count(), 0);
    });
}

#[test]
fn two_with_the_same_rank_are_refused() {
    watched(|| {
        let dir = meeting_place();
        let results = each(vec![0, 0], |rank| {
            Group::directory(dir.path(), rank, 2, SHORT)
        });
        let texts = results.iter().map(|result| match result {
            Err(error) => error.to_string(),
            Ok(group) => panic!("{group:?}"),
        });
        let text = texts.collect::<Vec<_>>().join("\n");
        assert!(text.contains("already listening"), "{text}");
    });
}

/// Rank 0 of two in a directory, to which the test connects as somebody else.
fn met_by(stranger: impl FnOnce(&Path) + Send + 'static) -> GroupError {
    watched(|| {
        let dir = meeting_place();
        let path = dir.path().to_path_buf();
        let other = std::thread::spawn(move || stranger(&path));
        let error = Group::directory(dir.path(), 0, 2, LONG).unwrap_err();
        other.join().unwrap();
        error
    })
}

fn connect(dir: &Path) -> OwnedFd {
    rendezvous::connect(dir, 0, Instant::now() + LONG)
        .unwrap()
        .into_fd()
}

#[test]
fn strangers_in_the_directory_are_reported() {
    let error = met_by(|dir| say(connect(dir), b"who is there?"));
    let ours = std::process::id().to_string();
    assert!(matches!(error, GroupError::Stranger { .. }), "{error}");
    assert!(error.to_string().contains(&ours), "{error}");

    let error = met_by(|dir| drop(connect(dir)));
    assert!(error.to_string().contains("hung up"), "{error}");

    let error = met_by(|dir| say(connect(dir), &hello(1, 2, u64::MAX, 0)));
    assert!(matches!(error, GroupError::Stranger { .. }), "{error}");

    let error = met_by(|dir| say(connect(dir), &hello(1, 2, 0, 0)));
    assert!(matches!(error, GroupError::Stranger { .. }), "{error}");
}

#[test]
fn ranks_that_differ_about_the_world_both_learn_it() {
    watched(|| {
        let dir = meeting_place();
        let errors = each(vec![(0, 2), (1, 3)], |(rank, world)| {
            Group::directory(dir.path(), rank, world, LONG).unwrap_err()
        });
        for (error, other) in errors.iter().zip([1, 0]) {
            match error {
                GroupError::Mismatch { source, field, .. } => {
                    assert_eq!((*source, *field), (other, "world size"));
                }
                other => panic!("{other:?}"),
            }
        }
    });
}

#[test]
fn a_rank_that_connects_and_says_nothing_is_missing() {
    watched(|| {
        let dir = meeting_place();
        let path = dir.path().to_path_buf();
        let (done, wait) = std::sync::mpsc::channel::<()>();
        let silent = std::thread::spawn(move || {
            let socket = connect(&path);
            let _ = wait.recv();
            drop(socket);
        });
        let error = Group::directory(dir.path(), 0, 2, SHORT).unwrap_err();
        match error {
            GroupError::Timeout { missing, .. } => assert_eq!(missing, [1]),
            other => panic!("{other:?}"),
        }
        drop(done);
        silent.join().unwrap();
    });
}

/// An exchange that does to the others' bytes what it is told to.
struct Bent<F>(Store, F);

impl<F: FnMut(&mut Vec<Vec<u8>>) -> io::Result<()>> direct_dcp::Exchange for Bent<F> {
    fn rank(&self) -> usize {
        self.0.rank()
    }

    fn world_size(&self) -> usize {
        self.0.world_size()
    }

    fn all_gather(&mut self, bytes: &[u8]) -> io::Result<Vec<Vec<u8>>> {
        let mut all = self.0.all_gather(bytes)?;
        (self.1)(&mut all)?;
        Ok(all)
    }
}

fn bent(bend: fn(&mut Vec<Vec<u8>>) -> io::Result<()>) -> Vec<GroupError> {
    watched(move || {
        each(Store::ranks(2), |store| {
            Group::with_exchange(&mut Bent(store, bend)).unwrap_err()
        })
    })
}

#[test]
fn an_exchange_that_fails_or_lies_is_an_error() {
    for error in bent(|_| Err(io::Error::other("the store is down"))) {
        assert!(error.to_string().contains("the store is down"), "{error}");
    }
    for error in bent(|all| {
        all.pop();
        Ok(())
    }) {
        assert!(error.to_string().contains("1 of them"), "{error}");
    }
    for error in bent(|all| {
        all[1] = b"???".to_vec();
        Ok(())
    }) {
        assert!(
            matches!(error, GroupError::InvalidArgument { .. }),
            "{error}"
        );
    }
    // Another machine's boot id.
    let far = bent(|all| {
        let path = all[1].iter().position(|&byte| byte == b'\n').unwrap();
        all[1].splice(..path, *b"elsewhere");
        Ok(())
    });
    assert!(
        matches!(far[0], GroupError::Unsupported { .. }),
        "{}",
        far[0]
    );
    // No place to meet.
    let lame = bent(|all| {
        let path = all[1].iter().position(|&byte| byte == b'\n').unwrap();
        all[1].truncate(path + 1);
        Ok(())
    });
    assert!(
        matches!(lame[0], GroupError::PeerFailed { rank: 1, .. }),
        "{}",
        lame[0]
    );
}

#[test]
fn a_launcher_gives_each_rank_once() {
    let mut launcher = Launcher::new(2).unwrap();
    assert_eq!(launcher.take(0).unwrap().len(), 2);
    assert!(launcher.take(0).is_err());
    assert!(launcher.take(2).is_err());
    assert!(Launcher::new(1).is_err());
    let error = launcher
        .spawn(1, &mut std::process::Command::new("/no/such/program"))
        .unwrap_err();
    assert!(error.to_string().contains("/no/such/program"), "{error}");
}
