//! `pushgate run`: starts the ranks of a job, on this host or on several over ssh, and ends them together.

mod hosts;
mod rank;
mod script;

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::io::Read as _;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use clap::{Arg, ArgAction, ArgMatches, Command, value_parser};
use pushgate::{Error, MAX_RANKS};
use pushgate_driver_shim::file::read_text;

use self::hosts::Host;
use self::rank::{Ended, Rank, Shell};
use crate::output::{OutputError, errln};
use crate::{exit, flags, signals};

/// The variables that hold the job's secret, or say where it is.
const SECRETS: [&str; 2] = ["PUSHGATE_SECRET", "PUSHGATE_SECRET_FILE"];
/// The variables that each rank is given anew.
const OWN: [&str; 5] =
    ["PUSHGATE_RANK", "PUSHGATE_RANKS", "PUSHGATE_LOCAL_RANK", "PUSHGATE_LOCAL_RANKS", "PUSHGATE_JOB"];
/// The first port of those that a run meets at if none is named, and how many there are.
const PORTS: [u16; 2] = [23000, 4000];

pub fn command() -> Command {
    let arg = |name: &'static str, value: &'static str, help: &'static str| {
        Arg::new(name).long(name).value_name(value).help(help)
    };
    Command::new("run")
        .about("Starts the ranks of a job, on this host or on several over ssh, and ends them together")
        .after_help(
            "Without hosts the ranks run here. Each rank has PUSHGATE_RANK, PUSHGATE_RANKS, PUSHGATE_LOCAL_RANK, \
             PUSHGATE_LOCAL_RANKS, PUSHGATE_JOB, PUSHGATE_SECRET and, on several hosts, PUSHGATE_RENDEZVOUS. Every \
             other PUSHGATE_ variable of this command goes to all ranks. When a rank fails, the others are ended, and \
             this command exits as that rank did. docs/clusters.md describes all.",
        )
        .arg(
            arg("ranks", "N", "Ranks [default: 1 here, else as many as the hosts take]").short('n'),
        )
        .arg(arg("hosts", "HOST[:SLOTS],...", "Hosts, as ssh names them, each with the number of ranks that it takes"))
        .arg(
            arg("hostfile", "FILE", "A file of hosts, one a line, as in: node1 slots=4")
                .value_parser(value_parser!(PathBuf))
                .conflicts_with("hosts"),
        )
        .arg(arg(
            "rendezvous-port",
            "PORT",
            "Port at the first host at which ranks of several hosts meet [default: a random one of 23000 to 26999]",
        ))
        .arg(
            arg("export", "NAME[=VALUE]", "Gives a variable to all ranks: this command's, or one of this value; can be repeated")
                .short('x')
                .action(ArgAction::Append)
                .value_parser(value_parser!(OsString)),
        )
        .arg(
            arg("workdir", "FOLDER", "The folder in which ranks run [default: this one]")
                .value_parser(value_parser!(OsString)),
        )
        .arg(arg("ssh", "COMMAND", "The command, with arguments of its own, that reaches a host").default_value("ssh"))
        .arg(
            Arg::new("no-prefix")
                .long("no-prefix")
                .action(ArgAction::SetTrue)
                .help("Prints ranks' lines as they are, without the rank's number before each"),
        )
        .arg(
            Arg::new("program")
                .value_name("PROGRAM")
                .required(true)
                .num_args(1..)
                .trailing_var_arg(true)
                .allow_hyphen_values(true)
                .value_parser(value_parser!(OsString))
                .help("The program of each rank, and its arguments, behind --"),
        )
}

/// What the command line asks for, checked.
struct Plan {
    ranks: Vec<Place>,
    prefix: bool,
}

/// One rank to be started.
struct Place {
    /// The host; `None`: this one.
    host: Option<Host>,
    shell: Shell,
    script: Vec<u8>,
}

pub fn run(m: &ArgMatches) -> Result<ExitCode> {
    let plan = plan(m, std::env::vars_os().collect())?;
    // Ctrl-C goes to this process alone, which ends the ranks in order.
    signals::catch(None);
    let (to, said) = channel();
    let mut ranks = Vec::new();
    for (number, place) in plan.ranks.into_iter().enumerate() {
        // The ranks that were started already end with the others' lifelines when this returns.
        let prefix = plan.prefix.then(|| format!("[{number}] "));
        ranks.push(Rank::start(place.shell, &place.script, place.host, prefix, to.clone())?);
        if signals::caught().is_some() {
            break;
        }
    }
    drop(to);
    supervise(&mut ranks, &said)
}

/// Waits until all ranks have ended, and ends them all when one fails, standard output does or a signal comes.
fn supervise(ranks: &mut [Rank], said: &Receiver<OutputError>) -> Result<ExitCode> {
    let mut failed: Option<u8> = None;
    let mut output = None;
    let mut ending: Option<Instant> = None;
    let mut killed = false;
    loop {
        match said.recv_timeout(Duration::from_millis(10)) {
            Ok(error) => output = output.or(Some(error)),
            Err(RecvTimeoutError::Timeout) => {}
            // Nobody prints any more: the ranks have ended or are about to.
            Err(RecvTimeoutError::Disconnected) => std::thread::sleep(Duration::from_millis(5)),
        }
        let mut running = 0;
        for (number, rank) in ranks.iter_mut().enumerate() {
            let Some(ended) = rank.ended()? else {
                running += 1;
                continue;
            };
            // What a rank does after the first failure is our doing.
            if let Ended::Failed { code, why } = ended
                && failed.is_none()
                && ending.is_none()
            {
                errln!("pushgate run: rank {number}{} {why}", rank.place());
                failed = Some(code);
            }
        }
        if ending.is_none() && (failed.is_some() || output.is_some() || signals::caught().is_some()) {
            ranks.iter_mut().for_each(Rank::end);
            ending = Some(Instant::now());
        }
        if running == 0 {
            break;
        }
        // A shell ends its rank after a while. One that does not is stopped itself, or behind a connection that hangs.
        if !killed && ending.is_some_and(|begin| begin.elapsed() > 2 * script::GRACE) {
            killed = true;
            for (number, rank) in ranks.iter_mut().enumerate().filter(|(_, rank)| rank.is_running()) {
                errln!("pushgate run: rank {number}{} does not end: killed what started it", rank.place());
                rank.kill();
            }
        }
    }
    let output = output.or_else(|| said.try_recv().ok());
    match (signals::caught(), output) {
        (Some(number), _) => Ok(ExitCode::from(exit::of_signal(number))),
        (None, Some(error)) if failed.is_none() => Err(error.into()),
        _ => Ok(failed.map_or(ExitCode::SUCCESS, ExitCode::from)),
    }
}

/// Checks the command line against the variables of this process.
fn plan(m: &ArgMatches, env: BTreeMap<OsString, OsString>) -> Result<Plan> {
    let wanted = flags::number(m, "ranks", 1, MAX_RANKS)?;
    let hosts = match (m.get_one::<String>("hosts"), m.get_one::<PathBuf>("hostfile")) {
        (Some(list), _) => hosts::of_list(list)?,
        (None, Some(path)) => hosts::of_file(&read(path)?, &path.display().to_string())?,
        (None, None) => Vec::new(),
    };
    let shares = match hosts.len() {
        0 => std::iter::once(0..wanted.unwrap_or(1)).collect(),
        _ => hosts::share(&hosts, wanted)?,
    };
    let count = shares.last().expect("there is one").end;
    let used = shares.iter().filter(|share| !share.is_empty()).count();
    let port = flags::number(m, "rendezvous-port", 1, u16::MAX.into())?;
    let random = random()?;
    let given = |name: &str| env.get(OsStr::new(name)).filter(|value| !value.is_empty());
    let mut common: BTreeMap<OsString, OsString> = env
        .iter()
        .filter(|(name, _)| name.as_bytes().starts_with(b"PUSHGATE_") && is_name(name))
        .filter(|(name, _)| OWN.iter().all(|own| *own != name.as_os_str()))
        .map(|(name, value)| (name.clone(), value.clone()))
        .collect();
    for export in m.get_many::<OsString>("export").into_iter().flatten() {
        let (name, value) = exported(export, &env)?;
        common.insert(name, value);
    }
    if SECRETS.iter().all(|name| given(name).is_none() && !common.contains_key(OsStr::new(name))) {
        common.insert(SECRETS[0].into(), hex(&random[..32]).into());
    }
    common.insert("PUSHGATE_JOB".into(), format!("run-{}", hex(&random[32..40])).into());
    common.insert("PUSHGATE_RANKS".into(), count.to_string().into());
    match (port, given("PUSHGATE_RENDEZVOUS").map(|place| place.to_string_lossy())) {
        (Some(port), Some(place)) => {
            let allowed = format!("none beside PUSHGATE_RENDEZVOUS={place}");
            return Err(Error::flag("rendezvous-port", port, allowed).into());
        }
        (Some(port), None) if used < 2 => {
            let allowed = "none for ranks of one host, which meet without a port";
            return Err(Error::flag("rendezvous-port", port, allowed).into());
        }
        (port, None) if used > 1 => {
            let [first, ports] = PORTS;
            let any = first + u16::from_le_bytes([random[40], random[41]]) % ports;
            let place = format!("{}:{}", hosts[0].address(), port.unwrap_or(any.into()));
            common.insert("PUSHGATE_RENDEZVOUS".into(), place.into());
        }
        _ => {}
    }
    let folder = match m.get_one::<OsString>("workdir") {
        Some(folder) => folder.clone(),
        None => std::env::current_dir().context("finding this folder")?.into(),
    };
    let program: Vec<OsString> = m.get_many("program").expect("clap requires it").cloned().collect();
    let ssh = m.get_one::<String>("ssh").expect("has a default");
    if ssh.split_whitespace().next().is_none() {
        return Err(Error::flag("ssh", ssh, "a command, as in: ssh -p 2222").into());
    }
    let mut ranks = Vec::new();
    for (at, share) in shares.into_iter().enumerate() {
        let host = hosts.get(at);
        for rank in share.clone() {
            let mut variables = common.clone();
            for (name, value) in [
                ("PUSHGATE_RANK", rank),
                ("PUSHGATE_LOCAL_RANK", rank - share.start),
                ("PUSHGATE_LOCAL_RANKS", share.len() as u32),
            ] {
                variables.insert(name.into(), value.to_string().into());
            }
            let variables: Vec<_> = variables.into_iter().collect();
            let script = script::script(&folder, &variables, &program);
            if script.len() > script::LONGEST {
                let allowed = format!("at most {} bytes, together with quotes", script::LONGEST);
                let value = format!("{} bytes", script.len());
                return Err(Error::config("variables and arguments of a rank", value, allowed).into());
            }
            let shell = match host {
                None => Shell::here(),
                Some(host) => Shell::over(ssh, host),
            };
            ranks.push(Place { host: host.cloned(), shell, script });
        }
    }
    Ok(Plan { ranks, prefix: !m.get_flag("no-prefix") })
}

fn read(path: &Path) -> Result<String> {
    let input = || exit::Input(format!("the hosts of {} can't be read", path.display()));
    read_text(path).with_context(input)
}

/// The variable that `NAME` or `NAME=VALUE` names.
fn exported(text: &OsStr, env: &BTreeMap<OsString, OsString>) -> Result<(OsString, OsString), Error> {
    let shown = || text.to_string_lossy().into_owned();
    let mut parts = text.as_bytes().splitn(2, |byte| *byte == b'=');
    let name = OsStr::from_bytes(parts.next().unwrap_or_default());
    if !is_name(name) {
        return Err(Error::flag("export", shown(), "NAME or NAME=VALUE, a name of letters, digits and _"));
    }
    if OWN.iter().any(|own| *own == name) {
        return Err(Error::flag(
            "export",
            shown(),
            "a variable that `pushgate run` does not set for each rank itself",
        ));
    }
    match parts.next() {
        Some(value) => Ok((name.into(), OsStr::from_bytes(value).into())),
        None => match env.get(name) {
            Some(value) => Ok((name.into(), value.clone())),
            None => Err(Error::flag("export", shown(), "a variable that is set here, or NAME=VALUE")),
        },
    }
}

/// Whether a shell takes this for the name of a variable.
fn is_name(name: &OsStr) -> bool {
    let bytes = name.as_bytes();
    let is_word = bytes.iter().all(|byte| byte.is_ascii_alphanumeric() || *byte == b'_');
    is_word && bytes.first().is_some_and(|byte| !byte.is_ascii_digit())
}

fn random() -> Result<[u8; 42]> {
    let mut bytes = [0; 42];
    std::fs::File::open("/dev/urandom")
        .and_then(|mut file| file.read_exact(&mut bytes))
        .context("a secret for the job from /dev/urandom")?;
    Ok(bytes)
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn planned(args: &str, env: &[(&str, &str)]) -> Result<Vec<(Option<String>, String)>> {
        let m = command().get_matches_from(["run"].into_iter().chain(args.split(' ')));
        let env = env.iter().map(|(name, value)| (name.into(), value.into())).collect();
        let all = plan(&m, env)?.ranks.into_iter();
        Ok(all.map(|p| (p.host.map(|host| host.name), String::from_utf8(p.script).unwrap())).collect())
    }

    fn refused(args: &str, env: &[(&str, &str)]) -> String {
        let e = planned(args, env).expect_err("it is accepted");
        assert_eq!(exit::code(&e), exit::WRONG, "{e}");
        e.to_string()
    }

    /// The value that a script gives a variable.
    fn value<'a>(script: &'a str, name: &str) -> Option<&'a str> {
        let line = script.lines().find_map(|line| line.strip_prefix(&format!("export {name}=")))?;
        Some(line.trim_matches('\''))
    }

    #[test]
    fn every_rank_is_told_where_it_stands() {
        let ranks = planned("--hosts a:2,me@b:4 -n 3 -- prog --flag", &[]).unwrap();
        let of = |name| ranks.iter().map(|(_, script)| value(script, name).unwrap()).collect::<Vec<_>>();
        assert_eq!(of("PUSHGATE_RANK"), ["0", "1", "2"]);
        assert_eq!(of("PUSHGATE_RANKS"), ["3", "3", "3"]);
        assert_eq!(of("PUSHGATE_LOCAL_RANK"), ["0", "1", "0"]);
        assert_eq!(of("PUSHGATE_LOCAL_RANKS"), ["2", "2", "1"]);
        assert_eq!(ranks.iter().map(|r| r.0.as_deref().unwrap()).collect::<Vec<_>>(), ["a", "a", "me@b"]);
        for name in ["PUSHGATE_JOB", "PUSHGATE_SECRET", "PUSHGATE_RENDEZVOUS"] {
            assert!(of(name).iter().all(|value| *value == of(name)[0]), "{name}");
        }
        assert_eq!(of("PUSHGATE_SECRET")[0].len(), 64);
        let (host, port) = of("PUSHGATE_RENDEZVOUS")[0].split_once(':').unwrap();
        assert!(host == "a" && (23000..27000).contains(&port.parse().unwrap()), "{host}:{port}");
        assert!(ranks[0].1.contains("\nset -- 'prog' '--flag'\n"), "{}", ranks[0].1);
        // Two runs are two jobs.
        let other = planned("-- prog", &[]).unwrap();
        assert_ne!(value(&other[0].1, "PUSHGATE_SECRET"), Some(of("PUSHGATE_SECRET")[0]));
        assert_ne!(value(&other[0].1, "PUSHGATE_JOB"), Some(of("PUSHGATE_JOB")[0]));
    }

    #[test]
    fn ranks_of_one_host_have_no_rendezvous() {
        for args in ["-n 4 -- p", "--hosts a:4 -- p", "--hosts a:4,b:4 -n 2 -- p"] {
            let ranks = planned(args, &[]).unwrap();
            assert!(ranks.iter().all(|(_, script)| value(script, "PUSHGATE_RENDEZVOUS").is_none()), "{args}");
        }
        let set = planned("-n 2 -- p", &[("PUSHGATE_RENDEZVOUS", "10.0.0.1:7")]).unwrap();
        assert_eq!(value(&set[1].1, "PUSHGATE_RENDEZVOUS"), Some("10.0.0.1:7"));
    }

    #[test]
    fn our_variables_and_exported_ones_reach_the_ranks() {
        let env = [
            ("PUSHGATE_QP", "verbs"),
            ("PUSHGATE_SECRET", "ours"),
            ("PUSHGATE_RANK", "7"),
            ("OTHER", "it's"),
            ("THIRD", "3"),
        ];
        let script = &planned("-x OTHER -x NEW=a=b -- p", &env).unwrap()[0].1;
        assert_eq!(value(script, "PUSHGATE_QP"), Some("verbs"));
        assert_eq!(value(script, "PUSHGATE_SECRET"), Some("ours"));
        assert_eq!(value(script, "PUSHGATE_RANK"), Some("0"));
        assert!(script.contains("export OTHER='it'\\''s'\n"), "{script}");
        assert_eq!((value(script, "NEW"), value(script, "THIRD")), (Some("a=b"), None));
        let file = &planned("-- p", &[("PUSHGATE_SECRET_FILE", "/key")]).unwrap()[0].1;
        assert_eq!(
            (value(file, "PUSHGATE_SECRET_FILE"), value(file, "PUSHGATE_SECRET")),
            (Some("/key"), None)
        );
    }

    #[test]
    fn what_can_not_be_started_is_refused() {
        for (args, says) in [
            ("-n 0 -- p", "invalid ranks `0` (from --ranks): expected 1 to 256"),
            ("-n 3 --hosts a:2 -- p", "invalid ranks `3` (from --ranks): expected at most 2"),
            ("--hosts a,b --rendezvous-port 0 -- p", "invalid rendezvous-port `0`"),
            ("-n 2 --rendezvous-port 7 -- p", "expected none for ranks of one host"),
            ("-x 1A=2 -- p", "invalid export `1A=2` (from --export): expected NAME"),
            ("-x NOT_SET -- p", "expected a variable that is set here"),
            ("-x PUSHGATE_RANK=1 -- p", "does not set for each rank itself"),
            ("--hostfile /nonexistent -- p", "the hosts of /nonexistent can't be read"),
        ] {
            let said = refused(args, &[]);
            assert!(said.contains(says), "{args}: {said}");
        }
        let both = refused("--hosts a,b --rendezvous-port 7 -- p", &[("PUSHGATE_RENDEZVOUS", "c:7")]);
        assert!(both.contains("expected none beside PUSHGATE_RENDEZVOUS=c:7"), "{both}");
        let long = format!("-x A={} -- p", "x".repeat(script::LONGEST));
        assert!(refused(&long, &[]).contains("expected at most 61440 bytes"));
    }
}
