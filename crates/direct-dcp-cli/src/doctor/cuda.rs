//! What the doctor finds out about the driver and its devices.

use super::{Check, Verdict};
use crate::gpu::{DEFAULT_QUEUES, MOST_QUEUES, QUEUES_VARIABLE};
use crate::report;
use direct_dcp::cuda::{Context, CudaError, Device, Driver, Outlook, multicast_forbidden_by};
use direct_dcp_cuda::{DeviceAttribute, probe};
use serde::Serialize;
use std::collections::BTreeMap;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::{env, fs};

/// Bytes of a row of which many users' caches are made, for the way that a group would take.
const ROW_BYTES: u32 = 1152;
/// Bytes that are written and read back.
const TEST_BYTES: usize = 1 << 20;

/// The parts of a driver's answer by which some failures can be told.
const NO_DEVICE: i32 = 100;
const NOT_PERMITTED: i32 = 800;
const SYSTEM_NOT_READY: i32 = 802;
const SYSTEM_DRIVER_MISMATCH: i32 = 803;

/// Everything that was found, as the JSON has it.
#[derive(Debug, Serialize)]
pub(super) struct Facts {
    /// Why there is nothing else to tell.
    error: Option<String>,
    driver: Option<DriverFacts>,
    devices: Vec<DeviceFacts>,
    peers: Vec<PeerFacts>,
    multicast_forbidden_by: Option<&'static str>,
    mps: bool,
    queues: Option<String>,
    /// What a group tries first with a rank on each device, or with two on the only one.
    way: Option<String>,
    /// The same for calls that copy out.
    way_copy_out: Option<String>,
    way_reason: Option<String>,
}

#[derive(Debug, Serialize)]
struct DriverFacts {
    version: String,
    library: String,
    /// Functions that are missing, by what they are for.
    missing: BTreeMap<String, Vec<&'static str>>,
}

#[derive(Debug, Serialize)]
struct DeviceFacts {
    ordinal: u32,
    name: String,
    uuid: String,
    compute_capability: (i32, i32),
    memory: u64,
    multiprocessors: i32,
    vmm: bool,
    multicast: bool,
    /// Offered by the attribute.
    posix_fd: bool,
    fabric: bool,
    /// What came of trying.
    posix_fd_tried: Tried,
    fabric_tried: Tried,
}

#[derive(Debug, Serialize)]
struct PeerFacts {
    from: u32,
    to: u32,
    access: bool,
    native_atomics: bool,
    performance_rank: i32,
    /// Random bytes written to and read from the peer's memory.
    tried: Tried,
}

/// How an attempt came out.
#[derive(Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Tried {
    No,
    Works,
    /// It was said to work, and the bytes were others.
    WrongBytes,
    Refused {
        code: Option<i32>,
        why: String,
    },
}

impl Tried {
    fn of(outcome: Result<bool, CudaError>) -> Self {
        match outcome {
            Ok(true) => Tried::Works,
            Ok(false) => Tried::WrongBytes,
            Err(error) => Tried::Refused {
                code: error.code(),
                why: error.to_string(),
            },
        }
    }

    fn words(&self) -> String {
        match self {
            Tried::No => "not tried".into(),
            Tried::Works => "works".into(),
            Tried::WrongBytes => "delivers wrong bytes".into(),
            Tried::Refused { why, .. } => why.clone(),
        }
    }
}

impl Facts {
    /// Whether there are devices for groups to be tried on.
    pub(super) fn usable(&self) -> bool {
        !self.devices.is_empty()
    }
}

/// Looks at everything. No multicast object is created.
pub(super) fn survey() -> (Vec<Check>, Facts) {
    let mut facts = Facts {
        error: None,
        driver: None,
        devices: Vec::new(),
        peers: Vec::new(),
        multicast_forbidden_by: multicast_forbidden_by(),
        mps: mps_is_running(),
        queues: env::var(QUEUES_VARIABLE).ok(),
        way: None,
        way_copy_out: None,
        way_reason: None,
    };
    match look(&mut facts) {
        Ok(()) => (checks(&facts), facts),
        Err(error) => {
            facts.error = Some(error.to_string());
            facts.devices.clear();
            (vec![absent(&error)], facts)
        }
    }
}

/// What to say where there is no driver or no device.
fn absent(error: &CudaError) -> Check {
    let says = error.to_string();
    match error.code() {
        None if matches!(error, CudaError::LibraryMissing { .. }) => {
            Check::new("cuda", Verdict::Absent, says)
        }
        Some(NO_DEVICE) => Check::new("cuda", Verdict::Absent, says).change(
            "if there is a GPU, look at CUDA_VISIBLE_DEVICES, and pass it to the container \
             (docker run --gpus all)",
        ),
        Some(SYSTEM_NOT_READY) => Check::new("cuda", Verdict::Failed, says)
            .change("start nvidia-fabricmanager, of the driver's version"),
        Some(SYSTEM_DRIVER_MISMATCH) => Check::new("cuda", Verdict::Failed, says).change(
            "the library and the kernel's driver are of different versions: reboot after an \
             upgrade, or take the library of the host into the container",
        ),
        _ => Check::new("cuda", Verdict::Failed, says),
    }
}

fn look(facts: &mut Facts) -> Result<(), CudaError> {
    let driver = Driver::load()?;
    let version = driver.version();
    let symbols = driver.symbols();
    facts.driver = Some(DriverFacts {
        version: format!("{}.{}", version / 1000, version % 1000 / 10),
        library: driver.library().into(),
        missing: symbols
            .into_iter()
            .filter(|report| !report.is_available())
            .map(|report| (format!("{:?}", report.group), report.missing))
            .collect(),
    });
    let devices = Device::all(&driver)?;
    let contexts: Vec<Context> = devices.iter().map(Context::new).collect::<Result<_, _>>()?;
    for context in &contexts {
        facts.devices.push(device(context)?);
    }
    for from in &contexts {
        for to in contexts.iter().filter(|to| *to != from) {
            let mappable = facts.devices.iter().all(|device| device.vmm);
            facts.peers.push(peer(from, to, mappable)?);
        }
    }
    // With one device, what a group there can do is a group that shares it.
    let ranks: Vec<Device> = match devices.as_slice() {
        [only] => vec![only.clone(), only.clone()],
        several => several.to_vec(),
    };
    if !ranks.is_empty() {
        let outlook = Outlook::new(&ranks, ROW_BYTES)?;
        facts.way = Some(outlook.way.to_string());
        facts.way_copy_out = Some(outlook.copy_out.to_string());
        facts.way_reason = outlook.obstacle;
    }
    Ok(())
}

fn device(context: &Context) -> Result<DeviceFacts, CudaError> {
    let device = context.device();
    let has = |attribute| device.supports(attribute);
    let vmm = has(DeviceAttribute::VirtualMemoryManagementSupported)?;
    let posix_fd = has(DeviceAttribute::HandleTypePosixFileDescriptorSupported)?;
    let fabric = has(DeviceAttribute::HandleTypeFabricSupported)?;
    let attempt =
        |offered: bool, attempt: &dyn Fn() -> Result<bool, CudaError>| match vmm && offered {
            true => Tried::of(attempt()),
            false => Tried::No,
        };
    Ok(DeviceFacts {
        ordinal: device.ordinal(),
        name: device.name()?,
        uuid: device
            .uuid()?
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect(),
        compute_capability: device.compute_capability()?,
        memory: device.total_memory()? as u64,
        multiprocessors: device.attribute(DeviceAttribute::MultiprocessorCount)?,
        vmm,
        multicast: has(DeviceAttribute::MulticastSupported)?,
        posix_fd,
        fabric,
        posix_fd_tried: attempt(posix_fd, &|| {
            probe::exported_memory_works(context, &noise())
        }),
        fabric_tried: attempt(fabric, &|| {
            probe::fabric_memory_works(context).map(|()| true)
        }),
    })
}

fn peer(from: &Context, to: &Context, mappable: bool) -> Result<PeerFacts, CudaError> {
    let link = from.device().peer_link(to.device())?;
    let access = link.access && from.device().can_access_peer(to.device())?;
    Ok(PeerFacts {
        from: from.device().ordinal(),
        to: to.device().ordinal(),
        access,
        native_atomics: link.native_atomics,
        performance_rank: link.performance_rank,
        tried: match access && mappable {
            true => Tried::of(probe::peer_memory_works(from, to, &noise())),
            false => Tried::No,
        },
    })
}

/// Random bytes, others every time.
fn noise() -> Vec<u8> {
    let state = RandomState::new();
    let word = |index| {
        let mut hasher = state.build_hasher();
        hasher.write_usize(index);
        hasher.finish().to_ne_bytes()
    };
    (0..TEST_BYTES / 8).flat_map(word).collect()
}

/// Whether the daemon that lets processes share a device at once is there.
fn mps_is_running() -> bool {
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    // The kernel keeps 15 bytes of a name.
    processes
        .filter_map(|entry| fs::read_to_string(entry.path().join("comm")).ok())
        .any(|name| name.trim_end().starts_with("nvidia-cuda-mps"))
}

fn checks(facts: &Facts) -> Vec<Check> {
    let mut checks = Vec::new();
    if let Some(driver) = &facts.driver {
        checks.extend(of_driver(driver));
    }
    checks.extend(facts.devices.iter().map(of_device));
    checks.extend([
        vmm(&facts.devices),
        posix_fd(&facts.devices),
        fabric(&facts.devices),
        multicast(facts),
    ]);
    checks.extend(
        facts
            .devices
            .iter()
            .filter_map(|device| peers(device, facts)),
    );
    checks.extend([mps(facts), queues(facts.queues.as_deref())]);
    if let Some(way) = &facts.way {
        checks.push(of_way(way, facts));
    }
    checks
}

fn of_driver(driver: &DriverFacts) -> [Check; 2] {
    let found = format!("CUDA {}, {}", driver.version, driver.library);
    let symbols = match driver.missing.is_empty() {
        true => Check::new(
            "symbols",
            Verdict::Ok,
            "every function that is used is there",
        ),
        false => {
            let missing: Vec<String> = driver
                .missing
                .iter()
                .map(|(group, names)| format!("{group}: {}", names.join(" ")))
                .collect();
            let found = format!("missing, by what they are for: {}", missing.join("; "));
            Check::new("symbols", Verdict::Limited, found).change("install a newer driver")
        }
    };
    [Check::new("cuda driver", Verdict::Ok, found), symbols]
}

fn of_device(device: &DeviceFacts) -> Check {
    let (major, minor) = device.compute_capability;
    let found = format!(
        "{} {}.., sm_{major}{minor}, {}, {} multiprocessors",
        device.name,
        device.uuid.get(..8).unwrap_or_default(),
        report::bytes(device.memory),
        device.multiprocessors
    );
    let what = format!("device {}", device.ordinal);
    if major < 8 {
        return Check::new(what, Verdict::Limited, found)
            .change("the kernels are for sm_80 and later: have the ranks on CPUs here");
    }
    Check::new(what, Verdict::Ok, found)
}

/// Which devices do not, in words; none if all do.
fn lacking(devices: &[DeviceFacts], has: impl Fn(&DeviceFacts) -> bool) -> Option<String> {
    let without: Vec<String> = devices
        .iter()
        .filter(|device| !has(device))
        .map(|device| device.ordinal.to_string())
        .collect();
    (!without.is_empty()).then(|| format!("not on device {}", without.join(", ")))
}

fn vmm(devices: &[DeviceFacts]) -> Check {
    match lacking(devices, |device| device.vmm) {
        None => Check::new(
            "vmm",
            Verdict::Ok,
            "virtual memory management on every device",
        ),
        Some(lacking) => Check::new("vmm", Verdict::Limited, lacking)
            .change("groups on GPUs need it: have the ranks on CPUs, or on devices that have it"),
    }
}

fn posix_fd(devices: &[DeviceFacts]) -> Check {
    let failed = devices
        .iter()
        .find(|device| device.posix_fd_tried != Tried::Works);
    let Some(device) = failed else {
        let found = "memory exported as a descriptor and imported again is the same memory";
        return Check::new("posix fd", Verdict::Ok, found);
    };
    let found = match device.posix_fd {
        false => format!("not offered by device {}", device.ordinal),
        true => format!(
            "device {}: {}",
            device.ordinal,
            device.posix_fd_tried.words()
        ),
    };
    Check::new("posix fd", Verdict::Limited, found)
        .change("ranks that are processes need it; ranks that are threads of one process do not")
}

fn fabric(devices: &[DeviceFacts]) -> Check {
    let needless = "ranks of one machine do not need it";
    let Some(device) = devices.iter().find(|device| device.fabric) else {
        let found = format!("not offered; {needless}");
        return Check::new("fabric", Verdict::Absent, found);
    };
    match &device.fabric_tried {
        Tried::Works => Check::new("fabric", Verdict::Ok, "fabric handles can be created"),
        Tried::No => Check::new("fabric", Verdict::Absent, needless),
        Tried::Refused {
            code: Some(NOT_PERMITTED),
            ..
        } => {
            let found =
                format!("offered, but not permitted: this process has no IMEX channel; {needless}");
            Check::new("fabric", Verdict::Limited, found).change(
                "across machines only: start nvidia-imex, and make \
                 /dev/nvidia-caps-imex-channels/channel0 readable here",
            )
        }
        other => {
            let found = format!("offered, but: {}; {needless}", other.words());
            Check::new("fabric", Verdict::Limited, found)
        }
    }
}

fn multicast(facts: &Facts) -> Check {
    let what = "multicast";
    if let Some(lacking) = lacking(&facts.devices, |device| device.multicast) {
        let found = format!("{lacking}: rows are stored once for each rank instead");
        return Check::new(what, Verdict::Absent, found);
    }
    let offered = "offered by every device (no object is created here to try)";
    match facts.multicast_forbidden_by {
        None => Check::new(what, Verdict::Ok, offered),
        Some(variable) => {
            let found = format!("{offered}; forbidden by {variable}");
            Check::new(what, Verdict::Limited, found)
                .change(&format!("unset {variable}, if nothing else here needs it"))
        }
    }
}

fn peers(device: &DeviceFacts, facts: &Facts) -> Option<Check> {
    let peers: Vec<&PeerFacts> = facts
        .peers
        .iter()
        .filter(|peer| peer.from == device.ordinal)
        .collect();
    if peers.is_empty() {
        return None;
    }
    let words: Vec<String> = peers
        .iter()
        .map(|peer| {
            let to = peer.to;
            if !peer.access {
                return format!("{to}: no access");
            }
            let atomics = match peer.native_atomics {
                true => "native atomics",
                false => "no native atomics",
            };
            let tried = match &peer.tried {
                Tried::Works => "bytes verified".into(),
                other => other.words(),
            };
            format!("{to}: {atomics}, rank {}, {tried}", peer.performance_rank)
        })
        .collect();
    let what = format!("peers of {}", device.ordinal);
    let found = words.join("; ");
    Some(
        if peers.iter().any(|peer| peer.tried == Tried::WrongBytes) {
            Check::new(what, Verdict::Failed, found).change(
            "peer access is offered and does not work: turn off PCIe ACS and the IOMMU in the BIOS \
             or on the kernel's command line, or leave these devices out",
        )
        } else if peers.iter().any(|peer| peer.tried != Tried::Works) {
            Check::new(what, Verdict::Limited, found)
                .change("ranks on devices without access to each other cannot form a group on GPUs")
        } else {
            Check::new(what, Verdict::Ok, found)
        },
    )
}

fn mps(facts: &Facts) -> Check {
    let found = match facts.mps {
        true => "running: processes share a device at once",
        false => "not running: processes that share a device take turns, some milliseconds each",
    };
    if !facts.mps && facts.devices.len() == 1 {
        return Check::new("mps", Verdict::Limited, found).change(
            "for several processes on one device, start nvidia-cuda-mps-control -d before them, or \
             make the ranks threads of one process",
        );
    }
    Check::new("mps", Verdict::Ok, found)
}

fn queues(setting: Option<&str>) -> Check {
    let number = setting.map_or(Some(DEFAULT_QUEUES), |text| text.trim().parse().ok());
    let found = match setting {
        None => format!("{QUEUES_VARIABLE} is not set: {DEFAULT_QUEUES} hardware queues"),
        Some(text) => format!("{QUEUES_VARIABLE}={text}"),
    };
    match number {
        Some(MOST_QUEUES..) => Check::new("queues", Verdict::Ok, found),
        _ => {
            let found = format!(
                "{found}; streams that share one are executed in turn, and of ranks in one process \
                 one may wait for another that is queued behind it"
            );
            let change = format!(
                "set {QUEUES_VARIABLE}={MOST_QUEUES} before a program whose ranks are threads loads \
                 the driver; gather and bench do so themselves where it is not set"
            );
            Check::new("queues", Verdict::Limited, found).change(&change)
        }
    }
}

fn of_way(way: &str, facts: &Facts) -> Check {
    let group = match facts.devices.len() {
        1 => "ranks that share this device take".to_string(),
        devices => format!("a group with a rank on each of the {devices} devices takes"),
    };
    let way = match &facts.way_copy_out {
        Some(copy_out) if copy_out != way => format!("{way}, and {copy_out} to copy out"),
        _ => way.to_string(),
    };
    match &facts.way_reason {
        None => Check::new(
            "way",
            Verdict::Ok,
            format!("{group} {way} if its self-test passes, else push"),
        ),
        Some(reason) => Check::new(
            "way",
            Verdict::Ok,
            format!("{group} {way}, not multicast, since {reason}"),
        ),
    }
}
