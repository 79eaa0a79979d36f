//! What every call goes through: the log, the planned failure, the check for initialisation.

use core::ffi::c_int;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

use crate::code::{Code, Outcome};

/// The log keeps this many calls.
const LOG_CALLS: usize = 100_000;

/// Calls that give something back.
const RELEASES: [&str; 14] = [
    "cuDevicePrimaryCtxRelease_v2",
    "cuCtxPopCurrent_v2",
    "cuStreamDestroy_v2",
    "cuStreamEndCapture",
    "cuEventDestroy_v2",
    "cuMemFree_v2",
    "cuMemFreeHost",
    "cuModuleUnload",
    "cuGraphExecDestroy",
    "cuGraphDestroy",
    "cuMemRelease",
    "cuMemAddressFree",
    "cuMemUnmap",
    "cuMulticastUnbind",
];

/// A failure that is planned for a later call.
pub(crate) struct Plan {
    /// Only calls of this function count; every call where `None`.
    pub(crate) symbol: Option<String>,
    /// How many calls are still to succeed, plus one.
    pub(crate) remaining: u64,
    pub(crate) code: Code,
    /// Whether a call that gives something back fails without having done so.
    pub(crate) refuse_releases: bool,
}

#[derive(Default)]
pub(crate) struct Journal {
    pub(crate) initialised: bool,
    pub(crate) calls: u64,
    pub(crate) log: Vec<(&'static str, c_int)>,
    pub(crate) plan: Option<Plan>,
    /// The function that the plan made fail.
    pub(crate) failed: Option<&'static str>,
}

static JOURNAL: LazyLock<Mutex<Journal>> = LazyLock::new(|| {
    let plan = std::env::var("DIRECT_DCP_FAKE_FAIL")
        .ok()
        .and_then(|text| parse_plan(&text));
    Mutex::new(Journal {
        plan,
        ..Journal::default()
    })
});

pub(crate) fn journal() -> MutexGuard<'static, Journal> {
    JOURNAL.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Reads `k`, `symbol:k`, `k:code` or `symbol:k:code`.
fn parse_plan(text: &str) -> Option<Plan> {
    let mut parts = text.split(':').peekable();
    let symbol = parts
        .next_if(|part| part.parse::<u64>().is_err())
        .map(str::to_owned);
    let remaining = parts.next()?.parse().ok()?;
    let code = parts
        .next()
        .and_then(|code| code.parse().ok())
        .map_or(Code::UNKNOWN, Code);
    Some(Plan {
        symbol,
        remaining,
        code,
        refuse_releases: false,
    })
}

/// What to do with a call.
enum Verdict {
    Run,
    Refuse(Code),
    RunAndReport(Code),
}

fn judge(name: &'static str) -> Verdict {
    let mut journal = journal();
    journal.calls += 1;
    let matches = journal
        .plan
        .as_ref()
        .is_some_and(|p| p.symbol.as_deref().is_none_or(|s| s == name));
    if !matches {
        return Verdict::Run;
    }
    let Some(plan) = journal.plan.as_mut() else {
        return Verdict::Run;
    };
    plan.remaining = plan.remaining.saturating_sub(1);
    if plan.remaining > 0 {
        return Verdict::Run;
    }
    let (code, refuse) = (plan.code, plan.refuse_releases);
    journal.plan = None;
    journal.failed = Some(name);
    if RELEASES.contains(&name) && !refuse {
        Verdict::RunAndReport(code)
    } else {
        Verdict::Refuse(code)
    }
}

/// Runs the body of an API function.
pub(crate) fn run(name: &'static str, body: impl FnOnce() -> Outcome) -> c_int {
    let checked = || {
        if name != "cuInit" && !journal().initialised {
            return Err(Code::NOT_INITIALIZED);
        }
        // A panic must not cross into C.
        catch_unwind(AssertUnwindSafe(body)).unwrap_or(Err(Code::UNKNOWN))
    };
    let outcome = match judge(name) {
        Verdict::Run => checked(),
        Verdict::Refuse(code) => Err(code),
        Verdict::RunAndReport(code) => checked().and(Err(code)),
    };
    let code = outcome.err().map_or(0, |code| code.0);
    let mut journal = journal();
    if journal.log.len() < LOG_CALLS {
        journal.log.push((name, code));
    }
    code
}

/// Declares exported C functions whose bodies return `Outcome`.
macro_rules! export {
    ($(fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $body:block)*) => {$(
        #[doc = concat!("`", stringify!($name), "`.")]
        #[allow(unsafe_code, non_snake_case)] // an exported symbol, named as in C
        #[allow(clippy::too_many_arguments)] // the C declaration's
        #[unsafe(no_mangle)]
        pub(crate) extern "C" fn $name($($arg: $ty),*) -> core::ffi::c_int {
            $crate::call::run(stringify!($name), || $body)
        }
    )*};
}

pub(crate) use export;

#[cfg(test)]
mod tests {
    use super::parse_plan;

    #[test]
    fn plans_are_read() {
        let plan = parse_plan("7").expect("a plan");
        assert_eq!((plan.symbol, plan.remaining, plan.code.0), (None, 7, 999));
        let plan = parse_plan("cuMemMap:2:1").expect("a plan");
        assert_eq!(
            (plan.symbol.as_deref(), plan.remaining, plan.code.0),
            (Some("cuMemMap"), 2, 1)
        );
        assert!(parse_plan("cuMemMap").is_none());
    }
}
