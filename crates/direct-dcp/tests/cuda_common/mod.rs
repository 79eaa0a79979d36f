//! What the tests of gathers between GPUs have in common: a machine whose GPUs are made up, ranks
//! on it, and rows to gather.
//!
//! A test runs as a process of its own, which is this test program again: what is not given back is
//! counted for a whole process, and so are the number of devices and what they can do. The process
//! that runs it also is its watchdog.
#![allow(dead_code, reason = "each test program uses its part")]
#![allow(unsafe_code)] // promises about rows that live here

use std::env;
use std::process::{Command, ExitStatus, Stdio};
use std::sync::OnceLock;
use std::thread;
use std::time::{Duration, Instant};

use direct_dcp::cuda::{
    Context, DeviceBuffer, DeviceRows, DeviceRowsMut, KvGather, Stream, Workspace,
};
use direct_dcp::{
    DType, GatherError, Group, Launcher, RowFormat, Way, WorkspaceError, WorkspaceOptions,
};
use direct_dcp_fake_cuda::Fake;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

/// Longer than any test takes.
const PATIENCE: Duration = Duration::from_secs(100);

/// What outputs are filled with before a call.
pub(crate) const POISON: u8 = 0xee;

/// Says which test a child is to run.
const TEST: &str = "DIRECT_DCP_TEST";
/// Says that a child is a rank.
const IS_RANK: &str = "DIRECT_DCP_TEST_RANK";

/// A machine with GPUs that are made up.
#[derive(Clone, Debug)]
pub(crate) struct Machine {
    devices: usize,
    without: &'static str,
    variables: Vec<(&'static str, String)>,
}

impl Machine {
    /// With everything that the fake driver offers.
    pub(crate) fn new(devices: usize) -> Self {
        Machine {
            devices,
            without: "",
            variables: Vec::new(),
        }
    }

    /// Without some of it.
    pub(crate) fn without(mut self, what: &'static str) -> Self {
        self.without = what;
        self
    }

    /// With a variable in the environment.
    pub(crate) fn with(mut self, name: &'static str, value: impl ToString) -> Self {
        self.variables.push((name, value.to_string()));
        self
    }

    /// This program again, to run `test` on this machine.
    fn command(&self, test: &str) -> Command {
        let mut command = Command::new(env::current_exe().unwrap());
        command
            .args([test, "--exact", "--nocapture", "--test-threads=1"])
            .env(TEST, test)
            .env("DIRECT_DCP_LIBCUDA", direct_dcp_fake_cuda::library_path())
            .env("DIRECT_DCP_FAKE_DEVICES", self.devices.to_string())
            .env("DIRECT_DCP_FAKE_WITHOUT", self.without);
        for switch in [
            "DIRECT_DCP_DISABLE_MULTICAST",
            "TORCH_SYMM_MEM_DISABLE_MULTICAST",
            "NCCL_NVLS_ENABLE",
        ] {
            command.env_remove(switch);
        }
        command.envs(self.variables.iter().cloned());
        command
    }

    /// Runs the body of `test` in a process on this machine, and checks that it gave everything
    /// back. Call it first thing in the test of that name.
    #[track_caller]
    pub(crate) fn run(&self, test: &str, body: impl FnOnce(&'static Fake)) {
        if env::var(TEST).is_ok_and(|name| name == test) {
            let fake = fake();
            body(fake);
            nothing_left(fake);
            return;
        }
        let log = tempfile::tempfile().unwrap();
        let mut command = self.command(test);
        command.stdout(log.try_clone().unwrap());
        command.stderr(log.try_clone().unwrap());
        command.stdin(Stdio::null());
        let status = wait(&mut command.spawn().unwrap());
        let said = read_file(log);
        let passed = status.is_some_and(|status| status.success());
        assert!(passed && said.contains("1 passed"), "{status:?}\n{said}");
    }

    /// Runs `body` in `world` processes on this machine, as its ranks. `expected` says how each
    /// may end; where it says nothing, by passing the test, everything given back.
    #[track_caller]
    pub(crate) fn run_ranks(
        &self,
        test: &str,
        world: usize,
        body: impl FnOnce(Group, &'static Fake),
        expected: impl Fn(usize, ExitStatus) -> Option<bool>,
    ) {
        if env::var(IS_RANK).is_ok_and(|name| name == test) {
            let fake = fake();
            body(Group::from_env().unwrap(), fake);
            nothing_left(fake);
            return;
        }
        let mut launcher = Launcher::new(world).unwrap();
        let mut ranks: Vec<_> = (0..world)
            .map(|rank| {
                let log = tempfile::tempfile().unwrap();
                let mut command = self.command(test);
                command.env(IS_RANK, test);
                command.stdout(log.try_clone().unwrap());
                command.stderr(log.try_clone().unwrap());
                (launcher.spawn(rank, &mut command).unwrap(), log)
            })
            .collect();
        let ends: Vec<_> = ranks.iter_mut().map(|(child, _)| wait(child)).collect();
        let mut bad = String::new();
        for (rank, ((_, log), status)) in ranks.into_iter().zip(ends).enumerate() {
            let said = read_file(log);
            let fine = status.is_some_and(|status| {
                expected(rank, status).unwrap_or(status.success() && said.contains("1 passed"))
            });
            if !fine {
                bad.push_str(&format!("rank {rank}, {status:?}:\n{said}\n"));
            }
        }
        assert!(bad.is_empty(), "{bad}");
    }
}

/// Waits for a child, or ends it.
fn wait(child: &mut std::process::Child) -> Option<ExitStatus> {
    let start = Instant::now();
    while start.elapsed() < PATIENCE {
        if let Some(status) = child.try_wait().unwrap() {
            return Some(status);
        }
        thread::sleep(Duration::from_millis(5));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    None
}

fn read_file(mut file: std::fs::File) -> String {
    use std::io::{Read, Seek};
    let mut bytes = Vec::new();
    file.rewind().unwrap();
    file.read_to_end(&mut bytes).unwrap();
    String::from_utf8_lossy(&bytes).into_owned()
}

fn fake() -> &'static Fake {
    static FAKE: OnceLock<Fake> = OnceLock::new();
    FAKE.get_or_init(|| {
        let fake = Fake::open();
        direct_dcp_fake_kernels::register(&fake);
        fake
    })
}

/// Checks that everything was given back.
#[track_caller]
pub(crate) fn nothing_left(fake: &Fake) {
    assert_eq!(fake.outstanding(), 0, "not given back: {}", fake.report());
    assert_eq!(fake.context_depth(), 0);
}

/// Runs `body` for each rank of a group of threads; the results in rank order.
#[track_caller]
pub(crate) fn threads<T: Send>(world: usize, body: impl Fn(Group) -> T + Sync) -> Vec<T> {
    let groups = Group::threads(world).unwrap();
    each(groups, body)
}

/// Runs `body` for each item in a thread of its own; the results in order.
#[track_caller]
pub(crate) fn each<I: Send, T: Send>(items: Vec<I>, body: impl Fn(I) -> T + Sync) -> Vec<T> {
    let body = &body;
    thread::scope(|scope| {
        let threads: Vec<_> = items
            .into_iter()
            .map(|item| scope.spawn(move || body(item)))
            .collect();
        let results = threads.into_iter().map(|thread| {
            let result = thread.join();
            result.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        });
        results.collect()
    })
}

/// Bytes that every rank can compute, none of them zero: those of `rank` in `call`.
pub(crate) fn rows_of(call: u64, rank: usize, bytes: usize) -> Vec<u8> {
    let mut rng = StdRng::seed_from_u64((call << 8) | rank as u64);
    let mut rows = vec![0; bytes];
    rng.fill_bytes(&mut rows);
    for byte in &mut rows {
        *byte = (*byte).max(1);
    }
    rows
}

/// What a gather of [`rows_of`] delivers.
pub(crate) fn rows_of_all(
    call: u64,
    ranks: impl IntoIterator<Item = usize>,
    bytes: usize,
) -> Vec<u8> {
    let all = ranks.into_iter().map(|rank| rows_of(call, rank, bytes));
    all.collect::<Vec<_>>().concat()
}

/// One rank with a gather, a stream, and storage of its own: rows first, then the output, each
/// with a margin that nobody may write.
pub(crate) struct Rank {
    pub(crate) stream: Stream,
    pub(crate) storage: DeviceBuffer,
    pub(crate) gather: KvGather,
    pub(crate) group: Group,
    /// Bytes of one rank's rows at most.
    most: usize,
}

/// Bytes around the output that must stay poisoned; a multiple of every access.
const MARGIN: usize = 64;

impl Rank {
    /// Builds a workspace on `device` and what else is needed.
    pub(crate) fn new(
        group: Group,
        device: u32,
        options: WorkspaceOptions,
    ) -> Result<Self, WorkspaceError> {
        let workspace = Workspace::new(&group, device, options)?;
        Ok(Self::of(group, workspace))
    }

    pub(crate) fn of(group: Group, workspace: Workspace) -> Self {
        let context = workspace.context().clone();
        let capacity = workspace.capacity_rows() * workspace.format().row_bytes();
        let most = (capacity / group.world_size()).next_multiple_of(64);
        let bytes = most + capacity + 2 * MARGIN;
        let stream = Stream::new(&context).unwrap();
        let storage = DeviceBuffer::new(&context, bytes).unwrap();
        let gather = KvGather::new(workspace)
            .timeout(Duration::from_secs(20))
            .first_timeout(Duration::from_secs(20));
        Rank {
            stream,
            storage,
            gather,
            group,
            most,
        }
    }

    /// With limits in milliseconds, for the first call and later ones.
    pub(crate) fn limits(mut self, first: u64, later: u64) -> Self {
        let (first, later) = (Duration::from_millis(first), Duration::from_millis(later));
        self.gather = self.gather.timeout(later).first_timeout(first);
        self
    }

    pub(crate) fn context(&self) -> &Context {
        self.gather.workspace().context()
    }

    pub(crate) fn row_bytes(&self) -> usize {
        self.gather.workspace().format().row_bytes()
    }

    pub(crate) fn rank(&self) -> usize {
        self.group.rank()
    }

    pub(crate) fn world(&self) -> usize {
        self.group.world_size()
    }

    /// Writes this rank's rows of a call, on a stream.
    pub(crate) fn fill_on(&self, stream: &Stream, call: u64, bytes: usize) {
        let rows = rows_of(call, self.rank(), bytes);
        self.storage.upload(stream, 0, &rows).unwrap();
    }

    /// This rank's rows in the storage.
    pub(crate) fn local(&self, bytes: usize) -> DeviceRows {
        // SAFETY: the storage lives longer than anything submitted, and is written only before a
        // call or after it.
        unsafe { DeviceRows::new(self.storage.address(), bytes) }
    }

    /// The output in the storage.
    pub(crate) fn out(&self, bytes: usize) -> DeviceRowsMut {
        let address = self.storage.address() + (self.most + MARGIN) as u64;
        // SAFETY: as in `local`; the two do not overlap.
        unsafe { DeviceRowsMut::new(address, bytes) }
    }

    /// Poisons the output, and what is around it.
    pub(crate) fn poison_on(&self, stream: &Stream) {
        let rest = self.storage.bytes() - self.most;
        self.storage
            .upload(stream, self.most, &vec![POISON; rest])
            .unwrap();
    }

    /// The output, after checking that nothing around its first `bytes` bytes was written.
    #[track_caller]
    pub(crate) fn output(&self, bytes: usize) -> Vec<u8> {
        let mut all = vec![0; self.storage.bytes() - self.most];
        self.storage
            .download(&self.stream, self.most, &mut all)
            .unwrap();
        let after = all.split_off(MARGIN + bytes);
        assert!(after.iter().all(|&byte| byte == POISON), "bytes after");
        let output = all.split_off(MARGIN);
        assert!(all.iter().all(|&byte| byte == POISON), "bytes before");
        output
    }

    /// Checks that no byte of the output was written.
    #[track_caller]
    pub(crate) fn output_untouched(&self) {
        assert_eq!(self.output(0), []);
    }

    /// Submits a gather of `rows` rows into the output, on a stream.
    pub(crate) fn submit_on(
        &self,
        stream: &Stream,
        ubatch: usize,
        rows: usize,
    ) -> Result<(), GatherError> {
        let bytes = rows * self.row_bytes();
        let (local, out) = (self.local(bytes), self.out(bytes * self.world()));
        self.gather.gather_into(ubatch, stream, local, out)
    }

    /// Fills, poisons, submits a gather into the output, waits for it.
    pub(crate) fn attempt(&self, ubatch: usize, rows: usize, call: u64) -> Result<(), GatherError> {
        self.fill_on(&self.stream, call, rows * self.row_bytes());
        self.poison_on(&self.stream);
        self.submit_on(&self.stream, ubatch, rows)?;
        self.gather.wait(&self.stream)
    }

    /// A gather into the output, and a look at every byte.
    #[track_caller]
    pub(crate) fn gather_into(&self, ubatch: usize, rows: usize, call: u64) {
        self.attempt(ubatch, rows, call).unwrap();
        self.check_output(rows, call);
    }

    #[track_caller]
    pub(crate) fn check_output(&self, rows: usize, call: u64) {
        let bytes = rows * self.row_bytes();
        let expected = rows_of_all(call, 0..self.world(), bytes);
        assert!(
            self.output(expected.len()) == expected,
            "call {call}: other bytes"
        );
    }

    /// A gather without a copy, and a look at every byte.
    #[track_caller]
    pub(crate) fn gather_lent(&self, ubatch: usize, rows: usize, call: u64) {
        let bytes = rows * self.row_bytes();
        self.fill_on(&self.stream, call, bytes);
        let gathered = self
            .gather
            .gather(ubatch, &self.stream, self.local(bytes))
            .unwrap();
        assert_eq!(gathered.bytes(), (bytes * self.world()) as u64);
        let address = gathered.address().unwrap();
        let got = read(&self.stream, address, bytes * self.world());
        self.gather.check().unwrap();
        assert!(
            got == rows_of_all(call, 0..self.world(), bytes),
            "call {call}: other bytes"
        );
        if self.gather.workspace().way() != Way::Staged {
            // The device says the same.
            let word = read(&self.stream, gathered.address_word(), 8);
            assert_eq!(word, address.to_ne_bytes());
        }
    }

    /// Calls that each ubatch has completed.
    pub(crate) fn epochs(&self) -> Vec<u64> {
        self.gather.status(&self.stream).unwrap().epochs
    }

    /// Waits for the work of all ranks: afterwards they may free memory, for which a driver waits
    /// until the whole device is idle.
    pub(crate) fn meet(&self) {
        self.stream.synchronize().unwrap();
        self.group.barrier().unwrap();
    }
}

/// Reads device memory that a call has lent, after the work of the stream.
pub(crate) fn read(stream: &Stream, address: u64, bytes: usize) -> Vec<u8> {
    let mut to = vec![0; bytes];
    // A copy to memory that is not pinned had better not wait for its turn.
    stream.synchronize().unwrap();
    // SAFETY: the vector outlives the copy, which is waited for; the memory is what a call said.
    unsafe { stream.copy_to_host(to.as_mut_ptr(), address, bytes) }.unwrap();
    stream.synchronize().unwrap();
    to
}

/// Every way between GPUs.
pub(crate) const WAYS: [Way; 5] = Way::CUDA;

/// bf16 rows of 576.
pub(crate) const ROWS: RowFormat = RowFormat::new(DType::BF16, 576);

/// Room for 128 such rows of each rank.
pub(crate) fn options(world: usize) -> WorkspaceOptions {
    WorkspaceOptions::new(128 * world, ROWS)
}
