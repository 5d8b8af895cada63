//! Two agents of NIXL, processes of a Python, for one turn of a backend.

use std::fs::{self, File};
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use serde::Deserialize;
use serde_json::{Value, json};

use super::table::Shape;
use crate::find;
use crate::signals;

/// The agents' program, in the folder of the check.
pub const PROGRAM: &str = "agent.py";
/// What every answer of the program begins with: libraries may print to standard output too.
const MARK: &str = "pushgate-nixl-check ";
/// Most time in which an agent answers, beside the time of a row. Libraries of CUDA take seconds to start.
const SILENCE: Duration = Duration::from_secs(120);
const NAMES: [&str; 2] = ["first", "second"];

/// What the program answers.
#[derive(Deserialize)]
pub enum Said {
    Good(Value),
    Failed(String),
}

impl Said {
    /// An answer, if the line is one.
    pub fn of(line: &str) -> Option<Said> {
        serde_json::from_str(line.strip_prefix(MARK)?).ok()
    }
}

/// The program in `folder`, run by a Python.
pub fn python(python: &str, folder: &Path) -> Command {
    let mut command = Command::new(python);
    // The program imports what lies beside it.
    command.arg(folder.join(PROGRAM)).env_remove("PYTHONSAFEPATH").env("PYTHONDONTWRITEBYTECODE", "1");
    command
}

/// Whether the CPU plays the plugin's GPU, for tests.
pub fn is_played() -> bool {
    std::env::var_os("_PUSHGATE_NIXL_GPU").is_some_and(|value| value == "cpu")
}

/// What is the same in all turns.
pub struct Plan {
    pub python: String,
    /// Of the program and of logs.
    pub folder: PathBuf,
    /// The module of NIXL.
    pub module: String,
    /// NIXL_PLUGIN_DIR.
    pub plugins: PathBuf,
    /// The GPU that each process sees; none for host memory.
    pub gpus: Option<[String; 2]>,
    /// Time of a row.
    pub seconds: f64,
    pub seed: u64,
}

/// What a turn brought.
#[derive(Debug)]
pub struct Turn {
    /// Of each row, the median of its transfers in seconds and the wrong bytes.
    pub rows: Vec<(f64, u64)>,
    /// Which way the bytes went.
    pub way: String,
    /// The names of the GPUs.
    pub devices: Option<[String; 2]>,
}

/// A process. It is ended on drop.
struct Agent {
    name: &'static str,
    child: Child,
    requests: ChildStdin,
    said: Receiver<Said>,
    /// Its standard error.
    log: PathBuf,
}

impl Drop for Agent {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Agent {
    fn start(plan: &Plan, side: usize, backend: &str, parameters: &[(String, String)]) -> Result<Agent> {
        let name = NAMES[side];
        let log = plan.folder.join(format!("{name}.log"));
        let task = json!({
            "module": plan.module,
            "name": name,
            "side": side,
            "seed": plan.seed,
            "backend": backend,
            "parameters": parameters.iter().cloned().collect::<std::collections::BTreeMap<_, _>>(),
            "memory": match plan.gpus {
                Some(_) if is_played() => "played",
                Some(_) => "gpu",
                None => "host",
            },
        });
        let mut command = python(&plan.python, &plan.folder);
        command
            .args(["serve", &task.to_string()])
            .env("NIXL_PLUGIN_DIR", &plan.plugins)
            // Both say in their logs which way bytes go.
            .env("PUSHGATE_LOG", "info")
            .env("UCX_LOG_LEVEL", "info")
            .env("UCX_LOG_FILE", "stderr")
            .envs(plan.gpus.as_ref().map(|gpus| ("CUDA_VISIBLE_DEVICES", &gpus[side])))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(File::create(&log).with_context(|| format!("making {}", log.display()))?)
            // Ctrl-C is for the command, which ends its agents.
            .process_group(0);
        let mut child = command.spawn().with_context(|| format!("starting {}", plan.python))?;
        let (sender, said) = channel();
        let lines = BufReader::new(child.stdout.take().expect("it is piped")).lines();
        std::thread::spawn(move || {
            lines
                .map_while(Result::ok)
                .filter_map(|line| Said::of(&line))
                .all(|said| sender.send(said).is_ok())
        });
        let requests = child.stdin.take().expect("it is piped");
        Ok(Agent { name, child, requests, said, log })
    }

    fn ask(&mut self, request: &Value) {
        // One that has ended does not answer, which says more.
        let _ = writeln!(self.requests, "{request}");
    }

    fn answer(&mut self, limit: Duration) -> Result<Value> {
        let begin = Instant::now();
        let why = loop {
            if signals::caught().is_some() {
                bail!("interrupted; the agents were ended");
            }
            match self.said.recv_timeout(Duration::from_millis(20)) {
                Ok(Said::Good(value)) => return Ok(value),
                Ok(Said::Failed(why)) => break why,
                Err(RecvTimeoutError::Disconnected) => break format!("ended: {}", self.child.wait()?),
                Err(RecvTimeoutError::Timeout) if begin.elapsed() < limit => {}
                Err(RecvTimeoutError::Timeout) => {
                    break format!("said nothing for {} s and was ended", limit.as_secs());
                }
            }
        };
        let said = fs::read(&self.log).unwrap_or_default();
        let said = String::from_utf8_lossy(&said);
        // Warnings and errors of the plugin say why; of other lines the last one may.
        let of_plugin = said.lines().rfind(|line| line.contains(" ERROR ") || line.contains(" WARN "));
        let is_other = |line: &&str| !line.trim().is_empty() && !line.contains(" INFO ");
        let line = of_plugin.or_else(|| said.lines().rfind(is_other));
        let line = line.map_or(String::new(), |line| format!("; its log says: {}", line.trim()));
        Err(anyhow!("agent {} (pid {}): {why}{line}", self.name, self.child.id()))
    }
}

/// Both agents.
pub struct Pair<'a> {
    plan: &'a Plan,
    backend: String,
    agents: [Agent; 2],
}

impl Pair<'_> {
    pub fn start<'a>(plan: &'a Plan, backend: &str, parameters: &[(String, String)]) -> Result<Pair<'a>> {
        let start = |side| Agent::start(plan, side, backend, parameters);
        Ok(Pair { plan, backend: backend.into(), agents: [start(0)?, start(1)?] })
    }

    /// Asks both, at once.
    fn both(&mut self, requests: [Value; 2]) -> Result<[Value; 2]> {
        for (agent, request) in self.agents.iter_mut().zip(&requests) {
            agent.ask(request);
        }
        let [first, second] = &mut self.agents;
        Ok([first.answer(SILENCE)?, second.answer(SILENCE)?])
    }

    /// Asks the first, which makes the transfers.
    fn first(&mut self, request: &Value) -> Result<Value> {
        let [first, _] = &mut self.agents;
        first.ask(request);
        first.answer(SILENCE + Duration::from_secs_f64(self.plan.seconds))
    }

    /// All rows.
    pub fn turn(mut self, rows: &[Shape], bar: &indicatif::ProgressBar) -> Result<Turn> {
        bar.set_message(self.backend.clone());
        let [first, second] = self.both([json!(["begin"]), json!(["begin"])]).context("at its start")?;
        let device = |begun: &Value| begun["device"].as_str().map(str::to_owned);
        let devices = device(&first).zip(device(&second)).map(|(a, b)| [a, b]);
        self.both([json!(["load", second]), json!(["load", first])]).context("at loading metadata")?;
        let mut measured = Vec::new();
        for row in rows {
            bar.set_message(format!("{} {row}", self.backend));
            measured.push(self.row(row).with_context(|| row.to_string())?);
            bar.inc(1);
        }
        let way = self.way();
        for agent in &mut self.agents {
            agent.ask(&json!(["end"]));
        }
        Ok(Turn { rows: measured, way, devices })
    }

    fn row(&mut self, row: &Shape) -> Result<(f64, u64)> {
        let ask = |what: &str| json!([what, row]);
        self.both([ask("fill"), ask("fill")])?;
        let took = self.first(&ask("transfer"))?;
        ensure!(took == self.backend.as_str(), "NIXL took the backend {took}");
        let wrong = self.both([ask("wrong"), ask("wrong")])?.iter().filter_map(Value::as_u64).sum();
        let seconds = self.first(&json!(["time", row, self.plan.seconds]))?;
        Ok((seconds.as_f64().context("no time")?, wrong))
    }

    /// Which way the bytes went, by the flight recorder and the logs.
    fn way(&self) -> String {
        let agent = &self.agents[0];
        let log = fs::read(&agent.log).unwrap_or_default();
        let log = String::from_utf8_lossy(&log);
        let recorded = find::one(agent.child.id()).ok();
        let engines = recorded.iter().flat_map(|found| &found.process.engines);
        match engines.flat_map(|engine| &engine.queue_pairs).last() {
            Some(pair) => way(&log, &pair.about.transport_name(), self.plan.gpus.is_some()),
            None => lanes(&log).unwrap_or_else(|| "no log says which way its bytes go".into()),
        }
    }
}

/// Which way bytes go by the plugin: what its log says, and the transport of its queue pair.
fn way(log: &str, transport: &str, is_gpu: bool) -> String {
    let connected = log.lines().rfind(|line| line.contains("connected peer="));
    // A system call copies host memory alone.
    match connected.is_some_and(|line| line.contains("direct=true")) && !is_gpu {
        true => format!("bytes go directly from process to process; messages by a `{transport}` queue pair"),
        false => format!("bytes go by messages of a `{transport}` queue pair"),
    }
}

/// What UCX's log says of its last endpoint.
fn lanes(log: &str) -> Option<String> {
    let line = log.lines().rfind(|line| line.contains("-node cfg#"))?;
    let lanes: Vec<_> = line.split_once("cfg#")?.1.split_whitespace().skip(1).collect();
    Some(format!("its log names {}", lanes.join(" ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_way_is_what_the_logs_say() {
        let log = |direct| {
            format!("INFO other\nINFO plugin: connected peer=\"second\" pid=5 direct={direct}\nINFO end")
        };
        let direct = "bytes go directly from process to process; messages by a `local` queue pair";
        assert_eq!(way(&log(true), "local", false), direct);
        let messages = "bytes go by messages of a `local` queue pair";
        assert_eq!(way(&log(false), "local", false), messages);
        assert_eq!(way(&log(true), "local", true), messages, "a GPU's memory");
        assert_eq!(way("INFO other", "local", false), messages, "no direct copies were asked for");
        let ucx = "[1] ucp_worker.c:1 UCX  INFO    first self cfg#0 am(tcp/lo)\n\
                   [1] ucp_worker.c:1 UCX  INFO    first intra-node cfg#1 rma_am(tcp/lo)  am(tcp/lo cma/memory)\n";
        assert_eq!(lanes(ucx).as_deref(), Some("its log names rma_am(tcp/lo) am(tcp/lo cma/memory)"));
        assert_eq!(lanes(""), None);
    }
}
