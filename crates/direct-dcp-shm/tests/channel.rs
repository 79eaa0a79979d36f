//! Channels: messages, descriptors, hang-ups and hostile packets.

mod common;

use common::{later, noise, open_fds, soon, within_patience};
use direct_dcp_shm::{Channel, MAX_MESSAGE, SharedMemory, ShmError};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
use std::thread;
use std::time::Instant;

/// Sends one packet past the channel's own checks.
fn send_raw(channel: &Channel, bytes: &[u8], fds: &[BorrowedFd<'_>]) {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(100))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        assert!(control.push(SendAncillaryMessage::ScmRights(fds)));
    }
    let sent = rustix::net::sendmsg(
        channel.as_fd(),
        &[IoSlice::new(bytes)],
        &mut control,
        SendFlags::empty(),
    );
    assert_eq!(sent.unwrap(), bytes.len());
}

/// A packet 0 that announces `len` bytes and carries `bytes`.
fn first_packet(len: u64, bytes: &[u8]) -> Vec<u8> {
    [&len.to_le_bytes(), bytes].concat()
}

#[test]
fn messages_arrive_whole_and_in_order() {
    within_patience(|| {
        let (a, b) = Channel::pair().unwrap();
        let sizes = [0, 1, 7, 8, 9, 32_767, 32_768, 32_769, 65_536, 65_537, 0, 3];
        let messages: Vec<_> = sizes.into_iter().map(noise).collect();
        thread::scope(|scope| {
            scope.spawn(|| {
                for message in &messages {
                    a.send(message, None, later()).unwrap();
                }
            });
            for message in &messages {
                let (got, fd) = b.recv(later()).unwrap();
                assert!(got == *message, "a message of {} bytes", message.len());
                assert!(fd.is_none());
            }
        });
    });
}

#[test]
fn the_largest_message_passes_and_a_larger_one_is_refused() {
    within_patience(|| {
        let (a, b) = Channel::pair().unwrap();
        // A block whose size has nothing in common with a packet's, repeated.
        let mut message = noise(1_000_003).repeat(MAX_MESSAGE / 1_000_003 + 1);
        message.truncate(MAX_MESSAGE + 1);
        let error = a.send(&message, None, later()).unwrap_err();
        assert!(matches!(error, ShmError::TooLarge { .. }), "{error}");
        message.pop();
        thread::scope(|scope| {
            scope.spawn(|| a.send(&message, None, later()).unwrap());
            assert!(b.recv(later()).unwrap().0 == message);
        });
    });
}

#[test]
fn both_directions_work_at_once() {
    within_patience(|| {
        let (a, b) = Channel::pair().unwrap();
        let (to_b, to_a) = (noise(3_000_000), noise(3_000_000));
        thread::scope(|scope| {
            scope.spawn(|| a.send(&to_b, None, later()).unwrap());
            scope.spawn(|| b.send(&to_a, None, later()).unwrap());
            scope.spawn(|| assert!(a.recv(later()).unwrap().0 == to_a));
            scope.spawn(|| assert!(b.recv(later()).unwrap().0 == to_b));
        });
    });
}

#[test]
fn threads_that_share_an_end_take_turns() {
    within_patience(|| {
        let (a, b) = Channel::pair().unwrap();
        let messages: Vec<_> = (0..4).map(|_| noise(300_000)).collect();
        thread::scope(|scope| {
            for message in &messages {
                scope.spawn(|| a.send(message, None, later()).unwrap());
            }
            let mut got: Vec<_> = (0..4).map(|_| b.recv(later()).unwrap().0).collect();
            let mut sent = messages.clone();
            got.sort_unstable();
            sent.sort_unstable();
            assert!(got == sent);
        });
    });
}

#[test]
fn a_descriptor_comes_with_its_message() {
    within_patience(|| {
        let (a, b) = Channel::pair().unwrap();
        let bytes = noise(100_000);
        let memory = SharedMemory::create("passed", 64).unwrap();
        thread::scope(|scope| {
            scope.spawn(|| {
                a.send(b"before", None, later()).unwrap();
                a.send(&bytes, Some(memory.fd()), later()).unwrap();
                a.send(b"", Some(memory.fd()), later()).unwrap();
                a.send(b"after", None, later()).unwrap();
            });
            assert!(b.recv(later()).unwrap().1.is_none());
            for expected in [&*bytes, b""] {
                let (got, fd) = b.recv(later()).unwrap();
                assert!(got == expected);
                let fd = fd.unwrap();
                let flags = rustix::io::fcntl_getfd(&fd).unwrap();
                assert!(flags.contains(rustix::io::FdFlags::CLOEXEC));
                SharedMemory::from_fd(fd, 64).unwrap();
            }
            assert!(b.recv(later()).unwrap().1.is_none());
        });
        assert_eq!(open_fds("passed"), 1);
        drop(memory);
        assert_eq!(open_fds("passed"), 0);
    });
}

/// Sends hostile packets and checks that `accept` accepts the error, that the channel is closed by
/// it, for both ends, and that none of the descriptors stays open.
#[track_caller]
fn refused(name: &str, packets: &[(&[u8], usize)], accept: impl Fn(&ShmError) -> bool) {
    let (a, b) = Channel::pair().unwrap();
    let memory = SharedMemory::create(name, 64).unwrap();
    for (bytes, fds) in packets {
        send_raw(&a, bytes, &vec![memory.fd(); *fds]);
    }
    drop(memory);
    let error = b.recv(soon()).unwrap_err();
    assert!(accept(&error), "{name}: {error:?}");
    assert_eq!(open_fds(name), 0, "{name}");
    assert!(a.is_closed() && b.is_closed(), "{name}");
    assert!(matches!(b.recv(later()), Err(ShmError::Closed)), "{name}");
    assert!(matches!(b.send(b"x", None, later()), Err(ShmError::Closed)));
    assert!(matches!(a.send(b"x", None, later()), Err(ShmError::Closed)));
}

#[test]
fn hostile_packets_are_refused_and_leak_nothing() {
    within_patience(|| {
        let text = noise(5);
        let good = first_packet(5, &text);
        refused("two-fds", &[(&good, 2)], |error| {
            matches!(error, ShmError::WrongFdCount { got: 2, allowed: 1 })
        });
        refused("many-fds", &[(&good, 100), (&good, 1)], |error| {
            matches!(error, ShmError::Truncated)
        });
        refused("long", &[(&noise(50_000), 1)], |error| {
            matches!(error, ShmError::Truncated)
        });
        refused("short", &[(&noise(7), 1)], |error| {
            matches!(error, ShmError::Malformed { .. })
        });
        refused("too-few", &[(&first_packet(6, &text), 1)], |error| {
            matches!(error, ShmError::Malformed { .. })
        });
        refused("too-many", &[(&first_packet(4, &text), 1)], |error| {
            matches!(error, ShmError::Malformed { .. })
        });
        refused(
            "huge",
            &[(&first_packet(1 << 63, &text), 1)],
            |error| matches!(error, ShmError::TooLarge { len, .. } if *len == 1 << 63),
        );

        let two = first_packet(32_769, &noise(32_768));
        refused("late-fd", &[(&two, 1), (&[9], 1)], |error| {
            matches!(error, ShmError::WrongFdCount { got: 1, allowed: 0 })
        });
        refused("interleaved", &[(&two, 1), (&good, 1)], |error| {
            matches!(
                error,
                ShmError::WrongFdCount { .. } | ShmError::Malformed { .. }
            )
        });
        refused("never-ends", &[(&two, 1)], |error| {
            matches!(error, ShmError::TimedOut)
        });
    });
}

#[test]
fn a_closed_peer_is_seen_without_taking_what_it_sent() {
    within_patience(|| {
        let (a, b) = Channel::pair().unwrap();
        assert!(!b.is_closed());
        let messages = [noise(10), noise(70_000)];
        for message in &messages {
            a.send(message, None, later()).unwrap();
        }
        assert!(!b.is_closed());
        drop(a);
        for message in &messages {
            assert!(b.is_closed());
            assert!(b.recv(later()).unwrap().0 == *message);
        }
        assert!(b.is_closed());
        assert!(matches!(b.recv(later()), Err(ShmError::Closed)));
        assert!(matches!(b.send(b"x", None, later()), Err(ShmError::Closed)));
    });
}

#[test]
fn a_peer_that_leaves_our_message_unread_loses_none_of_its_own() {
    within_patience(|| {
        let (a, b) = Channel::pair().unwrap();
        b.send(b"never read", None, later()).unwrap();
        a.send(b"last words", None, later()).unwrap();
        drop(a);
        assert_eq!(b.recv(later()).unwrap().0, b"last words");
        assert!(matches!(b.recv(later()), Err(ShmError::Closed)));
    });
}

#[test]
fn a_peer_that_hangs_up_ends_waits() {
    within_patience(|| {
        let (a, b) = Channel::pair().unwrap();
        thread::scope(|scope| {
            let receiver = scope.spawn(|| b.recv(later()));
            let sender = scope.spawn(|| b.send(&noise(10_000_000), None, later()));
            thread::sleep(std::time::Duration::from_millis(50));
            drop(a);
            assert!(matches!(receiver.join().unwrap(), Err(ShmError::Closed)));
            assert!(matches!(sender.join().unwrap(), Err(ShmError::Closed)));
        });
    });
}

#[test]
fn deadlines_are_kept() {
    within_patience(|| {
        let (a, b) = Channel::pair().unwrap();
        let deadline = soon();
        assert!(matches!(b.recv(deadline), Err(ShmError::TimedOut)));
        assert!(Instant::now() >= deadline);
        // Nothing was under way, so the channel still works, even with a deadline in the past.
        a.send(b"late", None, deadline).unwrap();
        assert_eq!(b.recv(deadline).unwrap().0, b"late");

        // Fill it up with whole messages; the one that does not fit leaves no trace.
        let message = noise(20_000);
        let mut sent = 0;
        let error = loop {
            match a.send(&message, None, soon()) {
                Ok(()) => sent += 1,
                Err(error) => break error,
            }
        };
        assert!(matches!(error, ShmError::TimedOut), "{error}");
        for _ in 0..sent {
            assert!(b.recv(later()).unwrap().0 == message);
        }
        a.send(b"again", None, later()).unwrap();
        assert_eq!(b.recv(later()).unwrap().0, b"again");

        // One that stops midway closes the channel.
        let error = a.send(&noise(10_000_000), None, soon()).unwrap_err();
        assert!(matches!(error, ShmError::TimedOut), "{error}");
        assert!(a.is_closed() && b.is_closed());
        assert!(matches!(b.recv(later()), Err(ShmError::Closed)));
    });
}

#[test]
fn only_a_connected_seqpacket_socket_is_a_channel() {
    let (a, b) = Channel::pair().unwrap();
    let a = Channel::from_fd(a.into_fd()).unwrap();
    a.send(b"adopted", None, later()).unwrap();
    assert_eq!(b.recv(later()).unwrap().0, b"adopted");

    let dir = tempfile::tempdir().unwrap();
    let unconnected = rustix::net::socket(
        rustix::net::AddressFamily::UNIX,
        rustix::net::SocketType::SEQPACKET,
        None,
    )
    .unwrap();
    let others: [(OwnedFd, &str); 6] = [
        (tempfile::tempfile().unwrap().into(), "not a socket"),
        (
            std::net::TcpListener::bind("127.0.0.1:0").unwrap().into(),
            "not a Unix socket",
        ),
        (UnixStream::pair().unwrap().0.into(), "SOCK_SEQPACKET"),
        (UnixDatagram::pair().unwrap().0.into(), "SOCK_SEQPACKET"),
        (
            UnixListener::bind(dir.path().join("s")).unwrap().into(),
            "SOCK_SEQPACKET",
        ),
        (unconnected, "not connected"),
    ];
    for (fd, why) in others {
        let error = Channel::from_fd(fd).unwrap_err();
        assert!(
            matches!(&error, ShmError::NotAChannel { reason } if reason.contains(why)),
            "{error}, not {why}"
        );
    }
}

#[test]
fn the_peer_of_a_pair_is_its_maker() {
    let (a, _b) = Channel::pair().unwrap();
    let peer = a.peer().unwrap();
    assert_eq!(peer.pid, std::process::id());
    assert_eq!(peer.uid, rustix::process::geteuid().as_raw());
    assert_eq!(peer.gid, rustix::process::getegid().as_raw());
    assert!(a.as_fd().as_fd().try_clone_to_owned().is_ok());
}
