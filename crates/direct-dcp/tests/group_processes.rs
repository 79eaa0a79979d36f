//! Groups of real processes, and what happens when some are killed.
//!
//! The processes are this test program again: it starts itself with nothing to run but
//! `rank_process`, which does nothing unless an environment variable gives it a part to play. So the
//! ranks need no program of their own to be built and found, and are compiled with what they test.
//! What a rank has to say it writes to its standard error, in lines that start with `@`.

mod group_common;

use direct_dcp::{Exchange, Group, GroupError, Launcher};
use group_common::{lost_rank, meeting_place, payload, watched};
use rand::{Rng, RngExt};
use std::env;
use std::fs;
use std::io::{self, BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::{Duration, Instant};

const PART: &str = "GROUP_TEST_PART";
const WAY: &str = "GROUP_TEST_WAY";
const PLACE: &str = "GROUP_TEST_PLACE";

/// The rank's side.
#[test]
#[ignore = "the other tests start it as their ranks"]
fn rank_process() {
    let Ok(part) = env::var(PART) else { return };
    let place = PathBuf::from(env::var_os(PLACE).unwrap());
    let number = |name| env::var(name).unwrap().parse::<usize>().unwrap();
    let group = match env::var(WAY).unwrap().as_str() {
        "environment" => Group::from_env(),
        "directory" => {
            let patience = Duration::from_secs(30);
            Group::directory(&place, number("RANK"), number("WORLD_SIZE"), patience)
        }
        "exchange" => Group::with_exchange(&mut Files {
            dir: place.clone(),
            rank: number("RANK"),
            world: number("WORLD_SIZE"),
        }),
        way => panic!("no way {way}"),
    };
    let group = match group {
        Ok(group) => group,
        Err(error) => return eprintln!("@error {error}"),
    };
    eprintln!("@up {} {}", group.rank(), group.world_size());
    match part.as_str() {
        "collectives" => collectives(&group),
        "survive" => survive(group, &place.join("stop")),
        "join twice" => eprintln!("@error {}", Group::from_env().unwrap_err()),
        part => panic!("no part {part}"),
    }
}

/// Checks what comes from everybody.
fn collectives(group: &Group) {
    for round in 0..20 {
        let bytes = payload(3, round, group.rank(), 100_000);
        let all = group.all_gather(&bytes).unwrap();
        let expected = (0..group.world_size()).map(|rank| payload(3, round, rank, 100_000));
        assert!(all.into_iter().eq(expected), "round {round}");
        group.barrier().unwrap();
    }
    let votes = group.vote(group.rank() != 1).unwrap();
    assert_eq!(votes.iter().filter(|&&yes| !yes).count(), 1);
    eprintln!("@done");
}

/// Gathers until told to stop, and rebuilds after every loss.
fn survive(mut group: Group, stop: &Path) {
    let mut rng = rand::rng();
    // The first rank of each rank there is now.
    let mut names: Vec<usize> = (0..group.world_size()).collect();
    loop {
        let seed = rng.next_u64();
        // With how many ranks to stop. A round with a victim in it may end well for some only.
        let wanted = fs::read_to_string(stop)
            .unwrap_or_default()
            .parse()
            .unwrap_or(0);
        let mut bytes = vec![wanted];
        bytes.extend(seed.to_le_bytes());
        bytes.extend(payload(seed, 0, 0, 60_000));
        match group.all_gather(&bytes) {
            Ok(all) => {
                assert_eq!(all.len(), names.len());
                for bytes in &all {
                    let (seed, rest) = bytes[1..].split_first_chunk().unwrap();
                    assert!(*rest == payload(u64::from_le_bytes(*seed), 0, 0, 60_000));
                }
                if all.iter().any(|bytes| usize::from(bytes[0]) == names.len()) {
                    break;
                }
            }
            Err(error) => {
                let Some(rank) = lost_rank(&error) else {
                    return eprintln!("@error {error}");
                };
                let how = match error {
                    GroupError::PeerLost { .. } => "lost",
                    _ => "rebuilding",
                };
                eprintln!("@{how} {}", names[rank]);
                group = match group.rebuild(Duration::from_secs(20)) {
                    Ok(group) => group,
                    Err(error) => return eprintln!("@error {error}"),
                };
                names = group
                    .previous_ranks()
                    .iter()
                    .map(|&old| names[old])
                    .collect();
                eprintln!("@rebuilt");
            }
        }
    }
    assert_eq!(group.world_size(), names.len());
    eprintln!("@done {} {names:?}", group.generation());
}

/// An exchange through files.
struct Files {
    dir: PathBuf,
    rank: usize,
    world: usize,
}

impl Exchange for Files {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.world
    }

    fn all_gather(&mut self, bytes: &[u8]) -> io::Result<Vec<Vec<u8>>> {
        let draft = self.dir.join(format!("draft-{}", self.rank));
        fs::write(&draft, bytes)?;
        fs::rename(&draft, self.dir.join(format!("card-{}", self.rank)))?;
        let card = |rank| loop {
            match fs::read(self.dir.join(format!("card-{rank}"))) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => {
                    thread::sleep(Duration::from_millis(1));
                }
                result => return result,
            }
        };
        (0..self.world).map(card).collect()
    }
}

/// Processes of one group, ended with it.
struct Ranks {
    children: Vec<Option<Child>>,
    /// What they say, without the `@`.
    lines: Receiver<(usize, String)>,
}

impl Ranks {
    fn start(
        world: usize,
        part: &str,
        way: &str,
        place: &Path,
        mut spawn: impl FnMut(usize, &mut Command) -> Child,
    ) -> Ranks {
        let (say, lines) = mpsc::channel();
        let start = |rank| {
            let mut command = Command::new(env::current_exe().unwrap());
            command
                .args(["rank_process", "--exact", "--ignored", "--nocapture"])
                .args(["--test-threads", "1"])
                .envs([(PART, part), (WAY, way)])
                .env(PLACE, place)
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .stderr(Stdio::piped());
            let mut child = spawn(rank, &mut command);
            let errors = BufReader::new(child.stderr.take().unwrap());
            let say = say.clone();
            thread::spawn(move || {
                for line in errors.lines().map_while(Result::ok) {
                    match line.strip_prefix('@') {
                        Some(line) => drop(say.send((rank, line.to_owned()))),
                        None => eprintln!("rank {rank}: {line}"),
                    }
                }
            });
            Some(child)
        };
        Ranks {
            children: (0..world).map(start).collect(),
            lines,
        }
    }

    /// By the launcher.
    fn launch(world: usize, part: &str, place: &Path) -> Ranks {
        let mut launcher = Launcher::new(world).unwrap();
        Ranks::start(world, part, "environment", place, |rank, command| {
            launcher.spawn(rank, command).unwrap()
        })
    }

    /// With variables as torchrun sets them.
    fn torchrun(
        world: usize,
        part: &str,
        way: &str,
        place: &Path,
        more: &[(&str, String)],
    ) -> Ranks {
        Ranks::start(world, part, way, place, |rank, command| {
            command
                .envs(["RANK", "LOCAL_RANK"].map(|name| (name, rank.to_string())))
                .envs(["WORLD_SIZE", "LOCAL_WORLD_SIZE"].map(|name| (name, world.to_string())))
                .envs(more.iter().map(|(name, value)| (name, value)))
                .spawn()
                .unwrap()
        })
    }

    /// The next line of anybody.
    fn line(&self) -> (usize, String) {
        self.lines.recv_timeout(Duration::from_secs(60)).unwrap()
    }

    /// Waits until every living rank has said a line that begins with `word`; gives these lines.
    fn all_say(&self, word: &str) -> Vec<(usize, String)> {
        let living = self.children.iter().flatten().count();
        let mut said: Vec<(usize, String)> = Vec::new();
        while said.len() < living {
            let (rank, line) = self.line();
            assert!(!line.starts_with("error"), "rank {rank}: {line}");
            if line.starts_with(word) && self.children[rank].is_some() {
                assert!(said.iter().all(|(earlier, _)| *earlier != rank));
                said.push((rank, line));
            }
        }
        said
    }

    fn kill(&mut self, rank: usize) {
        let mut child = self.children[rank].take().unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
    }

    fn all_succeed(mut self) {
        for child in self.children.iter_mut().filter_map(Option::take) {
            let mut child = child;
            assert!(child.wait().unwrap().success());
        }
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        for child in self.children.iter_mut().flatten() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

#[test]
fn processes_of_the_launcher() {
    watched(|| {
        let place = meeting_place();
        let ranks = Ranks::launch(4, "collectives", place.path());
        ranks.all_say("done");
        ranks.all_succeed();
    });
}

#[test]
fn processes_in_a_directory() {
    watched(|| {
        let place = meeting_place();
        let ranks = Ranks::torchrun(3, "collectives", "directory", place.path(), &[]);
        ranks.all_say("done");
        ranks.all_succeed();

        let dir = [("DIRECT_DCP_DIR", place.path().display().to_string())];
        let ranks = Ranks::torchrun(3, "collectives", "environment", place.path(), &dir);
        ranks.all_say("done");
        ranks.all_succeed();
        assert_eq!(place.path().read_dir().unwrap().count(), 0);
    });
}

/// Variables of a run that meets below `base`.
fn run_variables(base: &Path, id: &str) -> Vec<(&'static str, String)> {
    vec![
        ("MASTER_ADDR", "localhost".into()),
        ("MASTER_PORT", "29500".into()),
        ("TORCHELASTIC_RUN_ID", id.into()),
        ("XDG_RUNTIME_DIR", base.display().to_string()),
    ]
}

#[test]
fn processes_of_torchrun() {
    watched(|| {
        let place = meeting_place();
        // Two runs at once do not meet.
        let runs = ["one", "two/../../three"].map(|id| {
            let variables = run_variables(place.path(), id);
            Ranks::torchrun(3, "collectives", "environment", place.path(), &variables)
        });
        for ranks in runs {
            ranks.all_say("done");
            ranks.all_succeed();
        }
        assert_eq!(place.path().read_dir().unwrap().count(), 0);
    });
}

#[test]
fn processes_with_an_exchange() {
    watched(|| {
        let place = meeting_place();
        let ranks = Ranks::torchrun(3, "collectives", "exchange", place.path(), &[]);
        ranks.all_say("done");
        ranks.all_succeed();
    });
}

/// What one process with these variables has to say about them.
fn complaint(variables: &[(&str, &str)]) -> String {
    let place = meeting_place();
    let ranks = Ranks::start(
        1,
        "collectives",
        "environment",
        place.path(),
        |_, command| {
            for name in [
                "RANK",
                "WORLD_SIZE",
                "MASTER_ADDR",
                "MASTER_PORT",
                "DIRECT_DCP_DIR",
            ] {
                command.env_remove(name);
            }
            command.envs(variables.iter().copied()).spawn().unwrap()
        },
    );
    let (_, line) = ranks.line();
    line.strip_prefix("error ").unwrap_or("none").to_owned()
}

#[test]
fn variables_that_are_wrong_are_named() {
    watched(|| {
        for (variables, words) in [
            (&[][..], &["RANK", "torchrun"][..]),
            (&[("RANK", "0")], &["WORLD_SIZE", "not set"]),
            (&[("RANK", "x"), ("WORLD_SIZE", "2")], &["RANK", "\"x\""]),
            (&[("RANK", "-1"), ("WORLD_SIZE", "2")], &["RANK", "\"-1\""]),
            (&[("RANK", "2"), ("WORLD_SIZE", "2")], &["rank", "0 to 1"]),
            (
                &[("RANK", "0"), ("WORLD_SIZE", "1")],
                &["at least two ranks"],
            ),
            (
                &[
                    ("RANK", "0"),
                    ("WORLD_SIZE", "8"),
                    ("LOCAL_WORLD_SIZE", "4"),
                ],
                &["across machines", "LOCAL_WORLD_SIZE is 4"],
            ),
            (&[("RANK", "0"), ("WORLD_SIZE", "2")], &["MASTER_ADDR"]),
            (
                &[
                    ("RANK", "0"),
                    ("WORLD_SIZE", "2"),
                    ("DIRECT_DCP_TIMEOUT", "-3"),
                ],
                &["DIRECT_DCP_TIMEOUT", "seconds"],
            ),
            (
                &[
                    ("RANK", "0"),
                    ("WORLD_SIZE", "2"),
                    ("DIRECT_DCP_SOCKETS", "3,4"),
                ],
                &["DIRECT_DCP_SOCKETS", "Launcher"],
            ),
            (
                &[
                    ("RANK", "0"),
                    ("WORLD_SIZE", "2"),
                    ("DIRECT_DCP_SOCKETS", "stdin"),
                ],
                &["DIRECT_DCP_SOCKETS", "redirect"],
            ),
        ] {
            let text = complaint(variables);
            for word in words {
                assert!(text.contains(word), "{variables:?}: {text}");
            }
        }
    });
}

#[test]
fn ranks_that_do_not_come_in_time_are_named() {
    watched(|| {
        let place = meeting_place();
        let text = complaint(&[
            ("RANK", "0"),
            ("WORLD_SIZE", "3"),
            ("DIRECT_DCP_DIR", place.path().to_str().unwrap()),
            ("DIRECT_DCP_TIMEOUT", "0.2"),
        ]);
        assert!(text.contains("ranks 1 and 2"), "{text}");
    });
}

#[test]
fn a_process_joins_the_launchers_group_once() {
    watched(|| {
        let place = meeting_place();
        let ranks = Ranks::launch(2, "join twice", place.path());
        let mut complaints = 0;
        while complaints < 2 {
            let (_, line) = ranks.line();
            if line.starts_with("error") {
                assert!(line.contains("used up"), "{line}");
                complaints += 1;
            }
        }
        ranks.all_succeed();
    });
}

/// Starts `world` survivors, lets `harm` kill some, and checks that the others go on.
fn survivors(world: usize, harm: impl Fn(&mut Ranks, &mut Vec<usize>)) {
    let place = meeting_place();
    let mut ranks = Ranks::launch(world, "survive", place.path());
    ranks.all_say("up");
    let mut victims: Vec<usize> = Vec::new();
    harm(&mut ranks, &mut victims);
    let living = world - victims.len();
    fs::write(place.path().join("stop"), living.to_string()).unwrap();

    let mut last = Vec::new();
    while last.len() < living {
        let (rank, line) = ranks.line();
        match line.split_once(' ') {
            _ if ranks.children[rank].is_none() => {}
            Some(("lost", name)) => {
                assert!(
                    victims.contains(&name.parse().unwrap()),
                    "{name} was not killed"
                );
            }
            Some(("done", rest)) => last.push(rest.to_owned()),
            Some(("rebuilding", _)) => {}
            None if line == "rebuilt" => {}
            _ => panic!("rank {rank}: {line}; victims {victims:?}"),
        }
    }
    last.dedup();
    assert_eq!(last.len(), 1, "{last:?}");
    let names: Vec<usize> = (0..world).filter(|rank| !victims.contains(rank)).collect();
    assert!(last[0].ends_with(&format!("{names:?}")), "{last:?}");
    ranks.all_succeed();
}

fn a_moment(most: u64) {
    thread::sleep(Duration::from_micros(rand::rng().random_range(0..most)));
}

#[test]
fn a_killed_rank_is_named_and_the_others_go_on() {
    watched(|| {
        for round in 0..8 {
            survivors(4, |ranks, victims| {
                let victim = round % 4;
                a_moment(20_000);
                ranks.kill(victim);
                victims.push(victim);
                let killed = Instant::now();
                for (_, line) in ranks.all_say("lost") {
                    assert_eq!(line, format!("lost {victim}"));
                }
                eprintln!("all knew after {:.0?}", killed.elapsed());
            });
        }
    });
}

#[test]
fn two_may_be_killed_at_once() {
    watched(|| {
        for round in 0..6 {
            survivors(5, |ranks, victims| {
                a_moment(20_000);
                for victim in [round % 5, (round + 2) % 5] {
                    ranks.kill(victim);
                    victims.push(victim);
                    a_moment(500);
                }
            });
        }
    });
}

#[test]
fn a_rank_may_be_killed_during_the_rebuild() {
    watched(|| {
        for round in 0..10 {
            survivors(5, |ranks, victims| {
                let first = round % 5;
                ranks.kill(first);
                victims.push(first);
                while !ranks.line().1.starts_with("lost") {}
                a_moment(3_000);
                let second = (first + 1 + round % 4) % 5;
                ranks.kill(second);
                victims.push(second);
            });
        }
    });
}
