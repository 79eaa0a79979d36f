//! Bring-up through a store that the caller already has.

use super::bringup::{self, Places, check_rank};
use super::error::{GroupError, io_error};
use super::fabric::Generation;
use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::time::Duration;

/// Something that can pass a few bytes among all ranks, such as a process group of
/// `torch.distributed`, an MPI communicator or a key-value store.
///
/// It carries the handshake and nothing after it: one call of [`all_gather`](Self::all_gather) on
/// every rank.
///
/// ```
/// use direct_dcp::Exchange;
///
/// /// Ranks that are threads, and pass their bytes by channels.
/// struct ByChannels {
///     rank: usize,
///     to: Vec<std::sync::mpsc::Sender<(usize, Vec<u8>)>>,
///     from: std::sync::mpsc::Receiver<(usize, Vec<u8>)>,
/// }
///
/// impl Exchange for ByChannels {
///     fn rank(&self) -> usize {
///         self.rank
///     }
///     fn world_size(&self) -> usize {
///         self.to.len()
///     }
///     fn all_gather(&mut self, bytes: &[u8]) -> std::io::Result<Vec<Vec<u8>>> {
///         for peer in &self.to {
///             let message = (self.rank, bytes.to_vec());
///             peer.send(message).map_err(std::io::Error::other)?;
///         }
///         let mut all = vec![Vec::new(); self.to.len()];
///         for _ in 0..all.len() {
///             let (rank, bytes) = self.from.recv().map_err(std::io::Error::other)?;
///             all[rank] = bytes;
///         }
///         Ok(all)
///     }
/// }
/// ```
pub trait Exchange {
    /// The rank of the caller, below [`world_size`](Self::world_size).
    fn rank(&self) -> usize;

    /// How many ranks there are.
    fn world_size(&self) -> usize;

    /// Passes `bytes` to every rank, and returns what every rank passed, in rank order. The lengths
    /// may differ.
    ///
    /// # Errors
    /// Whatever the store reports; the group is then not built.
    fn all_gather(&mut self, bytes: &[u8]) -> io::Result<Vec<Vec<u8>>>;
}

/// Each rank listens in a private directory of its own, and the exchange says where.
pub(super) fn over_exchange(
    exchange: &mut dyn Exchange,
    timeout: Duration,
) -> Result<Generation, GroupError> {
    let (rank, world) = (exchange.rank(), exchange.world_size());
    check_rank(rank, world)?;
    let place = bringup::private_directory().and_then(|dir| {
        let listener = bringup::listen(&dir.path, rank)?;
        Ok((dir, listener))
    });
    // A rank that fails still takes part, so that nobody waits for it.
    let path = place.as_ref().map(|(dir, _)| dir.path.as_os_str());
    let card = Card {
        machine: machine(),
        path: path.map_or(Vec::new(), |path| path.as_bytes().to_vec()),
    };
    let cards = exchange
        .all_gather(&card.encode())
        .map_err(io_error("the exchange's all_gather"));
    let (dir, listener) = place?;
    let paths = read(&cards?, &card, world)?;
    let generation =
        bringup::over_directories(rank, world, &Places::Own(&paths), listener, timeout, || ());
    drop(dir);
    generation
}

/// What a rank says about itself.
struct Card {
    /// The same for all processes of one running machine, and for no other.
    machine: Vec<u8>,
    /// Where it listens; empty if it could not.
    path: Vec<u8>,
}

impl Card {
    fn encode(&self) -> Vec<u8> {
        [&self.machine[..], b"\n", &self.path].concat()
    }

    fn decode(bytes: &[u8]) -> Option<Card> {
        let end = bytes.iter().position(|&byte| byte == b'\n')?;
        let (machine, path) = bytes.split_at_checked(end)?;
        Some(Card {
            machine: machine.to_vec(),
            path: path.get(1..)?.to_vec(),
        })
    }
}

/// Where everybody listens.
fn read(cards: &[Vec<u8>], own: &Card, world: usize) -> Result<Vec<PathBuf>, GroupError> {
    let wrong = |got: String| GroupError::InvalidArgument {
        what: "what the exchange's all_gather returned",
        expected: format!("{world} byte strings, each as its rank passed it"),
        got,
    };
    if cards.len() != world {
        return Err(wrong(format!("{} of them", cards.len())));
    }
    let mut paths = Vec::with_capacity(world);
    for (rank, card) in cards.iter().enumerate() {
        let card =
            Card::decode(card).ok_or_else(|| wrong(format!("other bytes for rank {rank}")))?;
        if card.path.is_empty() {
            return Err(GroupError::PeerFailed {
                rank,
                what: "open a place to meet".into(),
            });
        }
        if card.machine != own.machine {
            return Err(GroupError::Unsupported {
                capability: "a group across machines",
                reason: format!("rank {rank} runs on another machine"),
                instead: "make one group per machine, and use NCCL or MPI between them",
            });
        }
        paths.push(PathBuf::from(OsStr::from_bytes(&card.path)));
    }
    Ok(paths)
}

/// What tells machines apart, and one run of a machine from the next; empty where `/proc` does not
/// tell.
fn machine() -> Vec<u8> {
    let id = fs::read("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    id.trim_ascii().to_vec()
}
