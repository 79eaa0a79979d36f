//! What the tests share: the fake driver, one test at a time, watchdogs, random data.

#![allow(dead_code)] // each test file uses its part

use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, mpsc};
use std::time::Duration;

use direct_dcp_cuda::{Context, Device, Driver};
use direct_dcp_fake_cuda::Fake;
use rand::Rng;

/// The fake driver of this process, for one test at a time: what is left over is counted for the
/// whole process. When the test is over, nothing may be.
pub(crate) struct Bench {
    pub(crate) fake: &'static Fake,
    pub(crate) driver: Arc<Driver>,
    _watchdog: Watchdog,
    _turn: MutexGuard<'static, ()>,
}

impl Bench {
    pub(crate) fn new() -> Self {
        static TURN: Mutex<()> = Mutex::new(());
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let fake = fake();
        let driver = driver();
        let _ = driver.take_release_error();
        Self {
            fake,
            driver,
            _watchdog: Watchdog::new(60),
            _turn: turn,
        }
    }

    pub(crate) fn context(&self, ordinal: u32) -> Context {
        let device = Device::new(&self.driver, ordinal).expect("a device");
        Context::new(&device).expect("a context")
    }

    /// Checks that everything was given back, in order, and that no context was left current.
    #[track_caller]
    pub(crate) fn finish(self) {
        assert_eq!(
            self.fake.outstanding(),
            0,
            "not given back: {}",
            self.fake.report()
        );
        assert_eq!(self.driver.take_release_error(), None);
        assert_eq!(self.fake.context_depth(), 0);
    }
}

pub(crate) fn fake() -> &'static Fake {
    static FAKE: OnceLock<Fake> = OnceLock::new();
    FAKE.get_or_init(Fake::open)
}

pub(crate) fn driver() -> Arc<Driver> {
    static DRIVER: OnceLock<Arc<Driver>> = OnceLock::new();
    Arc::clone(DRIVER.get_or_init(|| Driver::open(fake().path()).expect("the fake driver")))
}

/// Ends the process if it is not dropped in time: a test that hangs must fail.
pub(crate) struct Watchdog(Option<mpsc::Sender<()>>);

impl Watchdog {
    pub(crate) fn new(seconds: u64) -> Self {
        let (alive, over) = mpsc::channel::<()>();
        std::thread::spawn(move || {
            let answer = over.recv_timeout(Duration::from_secs(seconds));
            if answer == Err(mpsc::RecvTimeoutError::Timeout) {
                eprintln!("watchdog: nothing happened for {seconds} s");
                std::process::abort();
            }
        });
        Self(Some(alive))
    }
}

/// Random bytes, never all zeros.
pub(crate) fn random_bytes(count: usize) -> Vec<u8> {
    let mut bytes = vec![0_u8; count];
    rand::rng().fill_bytes(&mut bytes);
    bytes[0] |= 1;
    bytes
}

/// Waits for a child and checks that it ran its test and passed.
#[track_caller]
pub(crate) fn expect_passed(child: Child) {
    let output = child.wait_with_output().expect("a child");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(
        output.status.success() && text.contains("1 passed"),
        "{text}"
    );
}

/// Runs this test program again, with one test and one more variable, its pipes ours.
pub(crate) fn child(test: &str, variable: &str, value: &str) -> Child {
    Command::new(std::env::current_exe().expect("this program"))
        .args([test, "--exact", "--nocapture", "--test-threads=1"])
        .env(variable, value)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("a child")
}
