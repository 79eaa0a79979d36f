//! Ranks that are processes: this package's worker, started once a rank by the launcher.
//!
//! A worker is given its case as its last argument. What it has to say are lines on its standard output,
//! of which the last is its outcome: `ok` and the number of gathers, or `failed` and why.

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::{Duration, Instant};

use direct_dcp::{Group, GroupError, Launcher};

use super::{GroupRank, threads};
use crate::case::Case;
use crate::failure::{Failure, Outcome, ensure};
use crate::{Backend, scenarios};

/// Ranks that are processes.
#[derive(Clone, Debug)]
pub struct Processes {
    worker: PathBuf,
    arguments: Vec<String>,
}

impl Processes {
    /// Starts `worker` for each rank: a program whose main function calls [`worker`].
    #[must_use]
    pub fn of(worker: impl Into<PathBuf>) -> Self {
        Processes {
            worker: worker.into(),
            arguments: Vec::new(),
        }
    }

    /// The same with an argument before the case.
    #[must_use]
    pub fn with(mut self, argument: impl ToString) -> Self {
        self.arguments.push(argument.to_string());
        self
    }

    /// Runs the scenario `survive`, and kills `victim` some time after all ranks gather.
    ///
    /// # Errors
    /// Whatever a survivor did wrong: it named another rank, or could not go on.
    pub fn kill(&self, case: &Case, victim: usize, after: Duration) -> Result<Killed, Failure> {
        let mut ranks = Ranks::start(self, case)?;
        let mut up = 0;
        while up < case.world {
            match ranks.line()? {
                (_, Some(line)) if line == "up" => up += 1,
                (rank, line) => return Err(Failure(format!("rank {rank} said {line:?}"))),
            }
        }
        thread::sleep(after);
        let killed = Instant::now();
        ranks.kill(victim)?;
        let mut latency = Duration::ZERO;
        let mut named = Vec::new();
        let mut done = Vec::new();
        while done.len() < case.world - 1 {
            let (rank, line) = ranks.line()?;
            let Some(line) = line else {
                let ended = rank == victim || done.contains(&rank);
                ensure(ended, || format!("rank {rank} ended without a word"))?;
                continue;
            };
            if let Some(name) = line.strip_prefix("lost ") {
                latency = latency.max(killed.elapsed());
                named.push((rank, name.to_owned()));
            } else if let Some(outcome) = outcome(&line) {
                outcome.map_err(|error| Failure(format!("rank {rank}: {error}")))?;
                done.push(rank);
            }
        }
        let wrong: Vec<_> = named
            .into_iter()
            .filter(|(_, name)| *name != victim.to_string())
            .collect();
        Ok(Killed { latency, wrong })
    }
}

/// What became of a group of which one rank was killed.
#[derive(Clone, Debug)]
pub struct Killed {
    /// From the kill until the last survivor had told of its error.
    pub latency: Duration,
    /// Survivors that named somebody else, and whom.
    pub wrong: Vec<(usize, String)>,
}

impl Backend for Processes {
    fn name(&self) -> &'static str {
        "processes"
    }

    fn run(&self, case: &Case) -> Vec<Outcome> {
        let mut ranks = match Ranks::start(self, case) {
            Ok(ranks) => ranks,
            Err(error) => return vec![Err(error)],
        };
        let mut outcomes: Vec<Option<Outcome>> = vec![None; case.world];
        while outcomes.iter().any(Option::is_none) {
            match ranks.line() {
                Ok((rank, Some(line))) => {
                    let said = outcome(&line);
                    outcomes[rank] = outcomes[rank].take().or(said);
                }
                Ok((rank, None)) => {
                    let silent = || Err(Failure("it ended without a word".into()));
                    outcomes[rank].get_or_insert_with(silent);
                }
                Err(error) => {
                    for outcome in &mut outcomes {
                        outcome.get_or_insert_with(|| Err(error.clone()));
                    }
                }
            }
        }
        for (rank, outcome) in outcomes.iter_mut().enumerate() {
            if let (Some(Ok(_)), Err(error)) = (&outcome, ranks.wait(rank)) {
                *outcome = Some(Err(error));
            }
        }
        outcomes.into_iter().flatten().collect()
    }

    fn alone(&self) -> Option<GroupError> {
        Launcher::new(1).err()
    }
}

/// The processes of one case. They do not outlive it.
struct Ranks {
    children: Vec<Child>,
    /// A rank's next line, or that there are no more.
    lines: Receiver<(usize, Option<String>)>,
    until: Instant,
    patience: Duration,
}

impl Ranks {
    fn start(processes: &Processes, case: &Case) -> Result<Ranks, Failure> {
        let mut launcher = Launcher::new(case.world)?;
        let (sender, lines) = mpsc::channel();
        let patience = case.patience();
        let mut ranks = Ranks {
            children: Vec::new(),
            lines,
            until: Instant::now() + patience,
            patience,
        };
        for rank in 0..case.world {
            let mut command = Command::new(&processes.worker);
            command.args(&processes.arguments).arg(case.to_string());
            command.stdout(Stdio::piped());
            let mut child = launcher.spawn(rank, &mut command)?;
            let out = child.stdout.take();
            ranks.children.push(child);
            let sender = sender.clone();
            thread::spawn(move || {
                let lines = out.into_iter().flat_map(|out| BufReader::new(out).lines());
                for line in lines.map_while(Result::ok) {
                    if sender.send((rank, Some(line))).is_err() {
                        return;
                    }
                }
                // Nobody may be left to hear it.
                let _ = sender.send((rank, None));
            });
        }
        Ok(ranks)
    }

    fn line(&self) -> Result<(usize, Option<String>), Failure> {
        let left = self.until.saturating_duration_since(Instant::now());
        let hung = |_| Failure(format!("no end after {:?}", self.patience));
        self.lines.recv_timeout(left).map_err(hung)
    }

    fn kill(&mut self, rank: usize) -> Result<(), Failure> {
        self.children[rank]
            .kill()
            .map_err(|error| Failure(format!("cannot kill rank {rank}: {error}")))
    }

    /// Waits for the end of a rank that has spoken its last.
    fn wait(&mut self, rank: usize) -> Result<(), Failure> {
        loop {
            match self.children[rank].try_wait() {
                Ok(Some(status)) if status.success() => return Ok(()),
                Ok(Some(status)) => return Err(Failure(format!("it ended with {status}"))),
                Ok(None) if Instant::now() > self.until => {
                    return Err(Failure("it did not end".into()));
                }
                Ok(None) => thread::sleep(Duration::from_micros(200)),
                Err(error) => return Err(Failure(format!("lost sight of it: {error}"))),
            }
        }
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        for child in &mut self.children {
            // Most have ended by themselves.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn outcome(line: &str) -> Option<Outcome> {
    match line.split_once(' ')? {
        ("ok", gathers) => Some(gathers.parse().map_err(|_| Failure(line.into()))),
        ("failed", why) => Some(Err(Failure(why.into()))),
        _ => None,
    }
}

/// What a worker does: joins the launcher's group, and plays the part that its last argument names.
#[must_use]
pub fn worker() -> ExitCode {
    work(|group, case| scenarios::play(GroupRank(group), case))
}

/// The same, with another part to play.
pub(super) fn work(part: impl FnOnce(Group, &Case) -> Outcome) -> ExitCode {
    let case = std::env::args()
        .next_back()
        .unwrap_or_default()
        .parse::<Case>();
    let result = case.and_then(|case| {
        let group = Group::from_env()?;
        threads::caught(|| part(group, &case))
    });
    match result {
        Ok(gathers) => {
            println!("ok {gathers}");
            ExitCode::SUCCESS
        }
        Err(Failure(why)) => {
            println!("failed {}", why.replace('\n', " "));
            ExitCode::FAILURE
        }
    }
}
