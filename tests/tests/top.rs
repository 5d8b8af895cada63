//! `pushgate top` in a terminal of tmux's, while an allreduce runs.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use pushgate::settings::PluginSettings;
use pushgate_tests::built::scratch;
use pushgate_tests::{children, pushgate, skip, wait_until};
use rustix::process::{Pid, Signal, kill_process};

/// A program in an environment without settings.
fn clear(command: &mut Command) {
    for key in PluginSettings::keys() {
        command.env_remove(key.variable());
    }
    command.env_remove("PUSHGATE_CONFIG").env_remove("PUSHGATE_LOG");
}

/// Rows of an allreduce of two ranks: each has a queue pair to its right neighbour and one to its left.
const ROWS: usize = 4;

/// An allreduce of two ranks that goes on until this is dropped.
struct Allreduce(Child);

impl Allreduce {
    fn start() -> Allreduce {
        let mut command = Command::new(pushgate());
        clear(&mut command);
        command.args(["bench", "allreduce", "--ranks", "2", "--size", "64K", "--device", "cpu"]);
        command.args(["--in-place", "--iters", "1000000"]);
        let allreduce = Allreduce(command.stdout(Stdio::null()).spawn().unwrap());
        wait_until("two ranks", || allreduce.ranks().len() == 2);
        allreduce
    }

    /// The processes of its ranks.
    fn ranks(&self) -> Vec<u32> {
        children(self.0.id())
    }

    /// The cells of the rows of its ranks: others may run on this host.
    fn rows<'a>(&self, screen: &'a str) -> Vec<Vec<&'a str>> {
        let pids = self.ranks();
        let rows =
            screen.lines().map(|line| line.trim_start_matches('>').split_whitespace().collect::<Vec<_>>());
        rows.filter(|cells| {
            let pid = cells.first().and_then(|pid| pid.parse().ok());
            pid.is_some_and(|pid| pids.contains(&pid)) && cells.get(1) == Some(&"pushgate")
        })
        .collect()
    }
}

impl Drop for Allreduce {
    fn drop(&mut self) {
        // It ends its ranks.
        let _ = kill_process(Pid::from_child(&self.0), Signal::TERM);
        let _ = self.0.wait();
    }
}

/// A shell in a terminal of its own, and a folder for its files. Dropping it ends tmux with all that runs in it.
struct Terminal {
    socket: PathBuf,
    folder: PathBuf,
}

impl Terminal {
    /// `None`, and said so, where there is no tmux.
    fn start(name: &str) -> Option<Terminal> {
        if Command::new("tmux").arg("-V").output().is_err() {
            skip("`pushgate top` in a terminal needs tmux: apt-get install tmux");
            return None;
        }
        let folder = scratch(env!("CARGO_TARGET_TMPDIR")).join(format!("top-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let terminal = Terminal {
            socket: std::env::temp_dir().join(format!("pg-{name}-{}", std::process::id())),
            folder,
        };
        terminal.tmux(&["-f", "/dev/null", "new-session", "-d", "-x", "140", "-y", "24", "env PS1= sh"]);
        Some(terminal)
    }

    fn tmux(&self, args: &[&str]) -> String {
        let mut command = Command::new("tmux");
        clear(&mut command);
        let Output { status, stdout, stderr } =
            command.env("LC_ALL", "C.UTF-8").arg("-S").arg(&self.socket).args(args).output().unwrap();
        assert!(status.success(), "tmux {args:?}: {}", String::from_utf8_lossy(&stderr));
        String::from_utf8(stdout).unwrap()
    }

    fn types(&self, keys: &[&str]) {
        self.tmux(&[&["send-keys"], keys].concat());
    }

    fn screen(&self) -> String {
        self.tmux(&["capture-pane", "-p"])
    }

    #[track_caller]
    fn shows(&self, what: &str, is: impl Fn(&str) -> bool) -> String {
        let mut screen = String::new();
        wait_until(what, || {
            screen = self.screen();
            is(&screen)
        });
        screen
    }

    /// Runs `pushgate top` between two looks at the terminal's settings. After it the shell says how it ended.
    fn top(&self) {
        let folder = self.folder.display();
        let script = format!(
            "stty -a > {folder}/before\nsh -c 'echo $$ > {folder}/pid; exec {} top --interval 200ms'\n\
             echo ended with $?\nstty -a > {folder}/after\necho looked\n",
            pushgate().display()
        );
        // What is typed stays on the screen, so it must say nothing that is looked for.
        std::fs::write(self.folder.join("script"), script).unwrap();
        let line = format!(". {folder}/script");
        self.types(&[&line, "Enter"]);
    }

    /// `pushgate top` has ended so, and the terminal is as it was before.
    #[track_caller]
    fn ended(&self, with: u32) {
        let said = format!("ended with {with}");
        let screen = self.shows("the end", |s| {
            s.lines().any(|line| line == said) && s.lines().any(|line| line == "looked")
        });
        // The screen from before is back.
        assert!(!screen.contains("OUT GB/s"), "{screen}");
        let settings = |name: &str| std::fs::read_to_string(self.folder.join(name)).unwrap();
        assert_eq!(settings("before"), settings("after"));
        self.types(&["clear", "Enter"]);
        self.shows("an empty screen", |screen| screen.trim().is_empty());
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = Command::new("tmux").arg("-S").arg(&self.socket).arg("kill-server").output();
        let _ = std::fs::remove_dir_all(&self.folder);
        let _ = std::fs::remove_file(&self.socket);
    }
}

/// Whether the row's messages a second are more than none.
fn moves(cells: &[&str]) -> bool {
    cells.get(9).and_then(|messages| messages.parse::<f64>().ok()).is_some_and(|messages| messages > 0.0)
}

#[test]
fn a_terminal_shows_an_allreduce_obeys_keys_and_is_restored() {
    let Some(terminal) = Terminal::start("keys") else { return };
    let allreduce = Allreduce::start();
    terminal.top();
    let screen = terminal.shows("two ranks that send", |s| {
        allreduce.rows(s).iter().filter(|cells| moves(cells)).count() == ROWS
    });
    for cells in allreduce.rows(&screen) {
        assert_eq!(cells[5..7], ["local", "live"], "{screen}");
        assert!([["0", "1"], ["1", "0"]].iter().any(|ends| cells[3..5] == *ends), "{screen}");
    }
    assert!(screen.contains("sorted by bytes"), "{screen}");
    terminal.types(&["p"]);
    let screen =
        terminal.shows("another order", |s| s.contains("sorted by pid") && allreduce.rows(s).len() == ROWS);
    let pids: Vec<u32> = allreduce.rows(&screen).iter().map(|cells| cells[0].parse().unwrap()).collect();
    assert!(pids.is_sorted(), "{screen}");
    terminal.types(&["f"]);
    terminal.shows("a row for each process", |s| {
        allreduce.rows(s).iter().filter(|cells| cells[2] == "2x").count() == 2
    });
    terminal.types(&["f", "Down"]);
    terminal.shows("the sentence of a queue pair", |s| {
        s.lines().any(|line| line.starts_with("messages move"))
            || s.contains("rank 0")
            || s.contains("rank 1")
    });
    terminal.types(&["q"]);
    terminal.ended(0);
    terminal.top();
    terminal.shows("the ranks again", |s| allreduce.rows(s).len() == ROWS);
    terminal.types(&["C-c"]);
    terminal.ended(0);
    terminal.top();
    terminal.shows("the ranks once more", |s| allreduce.rows(s).len() == ROWS);
    let top = std::fs::read_to_string(terminal.folder.join("pid")).unwrap();
    kill_process(Pid::from_raw(top.trim().parse().unwrap()).unwrap(), Signal::TERM).unwrap();
    terminal.ended(143);
    // A terminal that is gone.
    terminal.top();
    terminal.shows("the ranks a last time", |s| allreduce.rows(s).len() == ROWS);
    let top = std::fs::read_to_string(terminal.folder.join("pid")).unwrap();
    terminal.tmux(&["kill-server"]);
    wait_until("the end without a terminal", || !Path::new("/proc").join(top.trim()).exists());
}

#[test]
fn a_table_is_printed_once_where_there_is_no_terminal() {
    let allreduce = Allreduce::start();
    let print = |args: &[&str]| {
        let mut command = Command::new(pushgate());
        clear(&mut command);
        let Output { status, stdout, stderr } =
            command.arg("top").args(args).stdin(Stdio::null()).output().unwrap();
        assert!(status.success(), "{}", String::from_utf8_lossy(&stderr));
        String::from_utf8(stdout).unwrap()
    };
    wait_until("two ranks that send", || {
        let table = print(&["--interval", "300ms"]);
        assert!(table.trim_start().starts_with("PID  NAME ") && !table.contains('\u{1b}'), "{table:?}");
        allreduce.rows(&table).iter().filter(|cells| moves(cells)).count() == ROWS
    });
    let folded = print(&["--once", "--fold", "--sort", "name", "--interval", "50ms"]);
    let seen: Vec<_> = allreduce.rows(&folded).iter().map(|cells| cells[2]).collect();
    assert_eq!(seen, ["2x", "2x"], "{folded}");
}
