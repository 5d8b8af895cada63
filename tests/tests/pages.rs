//! Commands of the documentation are run as they stand: a reader copies whole lines.
//!
//! `<!-- run 1 3 -->` before a block names the lines of the block that are run, each in a shell, one after the other and in one folder;
//! without numbers all are. What a line exports, later lines of the page see. `<!-- save NAME -->` before a block writes the block into
//! the file NAME of that folder, for the lines that come after it. Lines that need a GPU, a NIC, a second host or a file of the
//! reader's are not named. What a line of `pushgate` names as flags is looked at in all blocks (`command.rs`).
//!
//! The folder has what a line may find in a checkout, `examples` and the wheel in `target/wheels`, and a program of the reader's,
//! `program.c`. HOME is a folder that all pages share.

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Duration;
use std::{env, fs};

use pushgate::settings::PluginSettings;
use pushgate_tests::built::{example, forget_package, pushgate, root, scratch};
use pushgate_tests::{patience, skip};

/// What a mark has done with the block that follows it.
#[derive(Debug, PartialEq)]
enum Marked<'a> {
    /// These lines are run.
    Run(Vec<&'a str>),
    /// The block is saved under this name.
    Save(&'a str, String),
}

/// The marked blocks of a page, in order.
fn marked(page: &str) -> Vec<Marked<'_>> {
    let mut found = Vec::new();
    let lines: Vec<_> = page.lines().collect();
    for (at, line) in lines.iter().enumerate() {
        let mark = line.trim().strip_prefix("<!-- ").and_then(|rest| rest.strip_suffix(" -->"));
        let Some((task, words)) = mark.map(|mark| mark.split_once(' ').unwrap_or((mark, ""))) else {
            continue;
        };
        if !matches!(task, "run" | "save") {
            continue;
        }
        let fence = |line: &str| line.trim_start().starts_with("```");
        assert!(lines.get(at + 1).is_some_and(|next| fence(next)), "a mark is before a block: {line}");
        let block: Vec<_> = lines[at + 2..].iter().copied().take_while(|line| !fence(line)).collect();
        if task == "save" {
            found.push(Marked::Save(words, block.join("\n") + "\n"));
            continue;
        }
        let numbers: Vec<usize> =
            words.split_whitespace().map(|n| n.parse().expect("a line's number")).collect();
        found.push(Marked::Run(match &numbers[..] {
            [] => block,
            some => some.iter().map(|n| block[n - 1]).collect(),
        }));
    }
    found
}

/// The shell of one reader, who goes through a page.
struct Reader {
    folder: PathBuf,
    home: PathBuf,
    wheels: PathBuf,
}

impl Reader {
    /// Runs a line as a reader's shell would. What the line exports is kept for the next one.
    fn run(&self, line: &str) -> Output {
        let places =
            [pushgate().parent().unwrap().to_path_buf(), example("allreduce").parent().unwrap().into()];
        let path = env::join_paths(places.into_iter().chain(env::split_paths(&env::var_os("PATH").unwrap())));
        // Building may take minutes; whatever else a page shows takes seconds.
        let is_cargo = line.starts_with("cargo ");
        let limit = patience(Duration::from_secs(if is_cargo { 600 } else { 60 })).as_secs().to_string();
        let script = match is_cargo {
            true => format!("cd \"$_PAGES_ROOT\"\n{line}"),
            false => {
                format!("touch exported; . ./exported\n{line}\nstatus=$?; export -p > exported; exit $status")
            }
        };
        let mut shell = Command::new("timeout");
        shell.args(["--kill-after=5", &limit, "bash", "-o", "pipefail", "-c", &script]);
        shell.current_dir(&self.folder);
        for key in PluginSettings::keys() {
            shell.env_remove(key.variable());
        }
        forget_package(&mut shell);
        if let Some(home) = env::home_dir() {
            for (name, folder) in [("CARGO_HOME", ".cargo"), ("RUSTUP_HOME", ".rustup")] {
                shell.env(name, env::var_os(name).unwrap_or_else(|| home.join(folder).into()));
            }
        }
        shell.env("HOME", &self.home).env("PKG_CONFIG_PATH", self.home.join(".local/lib/pkgconfig"));
        shell.env("PUSHGATE_DEVICE", "cpu").env("XDG_CACHE_HOME", &self.folder).env("_PAGES_ROOT", root());
        // With another PATH the build looks for nvcc again, and compiles all that holds device code anew.
        if !is_cargo {
            shell.env("PATH", path.unwrap());
        }
        shell.output().unwrap()
    }

    /// What this host lacks for a line, as a reason to leave the rest of the page out.
    fn lacks(&self, line: &str) -> Option<String> {
        let succeeds = |program: &str, arguments: &[&str]| {
            Command::new(program).args(arguments).output().is_ok_and(|output| output.status.success())
        };
        if line.contains("target/wheels/") && !self.has_a_wheel() {
            return Some("no wheel of these sources: build one by cargo xtask package --wheel".into());
        }
        if line.contains("-m venv") && !succeeds("python3", &["-c", "import ensurepip, venv"]) {
            return Some("no python3 with venv: install python3-venv".into());
        }
        let programs = ["cc", "man", "pkg-config"];
        let mut words = line.split(|c: char| !(c.is_alphanumeric() || c == '-'));
        let missing = words.find(|word| programs.contains(word) && !succeeds(word, &["--version"]))?;
        Some(format!("no {missing}: install it"))
    }

    /// Whether one wheel is there, with the bindings and the header of these sources.
    fn has_a_wheel(&self) -> bool {
        const LOOK: &str = "import glob, pathlib, sys, zipfile\n\
            wheel, = glob.glob(sys.argv[1] + '/pushgate-*.whl')\n\
            root, inside = pathlib.Path(sys.argv[2]), zipfile.ZipFile(wheel)\n\
            same = lambda here, there: (root / here).read_bytes() == inside.read(there)\n\
            assert same('python/src/pushgate/_api.py', 'pushgate/_api.py')\n\
            header = 'include/pushgate/pushgate.h'\n\
            assert same('c-api/' + header, 'pushgate/_native/' + header)\n";
        let looked = Command::new("python3").args(["-c", LOOK]).arg(&self.wheels).arg(root()).output();
        looked.is_ok_and(|output| output.status.success())
    }
}

/// Pages that use the Python wheel, which takes minutes to build, have a test of their own.
const OF_THE_WHEEL: [&str; 1] = ["python.md"];

#[test]
fn marked_lines_of_the_documentation_succeed_as_they_stand() {
    // The test is of use only if it finds lines.
    let least = 15;
    run("pages", |page| !OF_THE_WHEEL.contains(&page), least);
}

#[test]
#[ignore = "needs a wheel of these sources: cargo xtask test --full --only wheel"]
fn marked_lines_about_the_wheel_succeed_as_they_stand() {
    run("pages-wheel", |page| OF_THE_WHEEL.contains(&page), 4);
}

/// Runs the marked lines of some pages, at least `least` of them, in a folder `name`.
fn run(name: &str, wanted: impl Fn(&str) -> bool, least: usize) {
    let Ok(pages) = fs::read_dir(root().join("docs")) else {
        return skip("this bundle has no documentation");
    };
    let all = scratch(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = fs::remove_dir_all(&all);
    let wheels = Path::new(env!("CARGO_TARGET_TMPDIR")).with_file_name("wheels");
    // By name: the C library, which c-api.md installs, is there for the pages after it.
    let mut pages: Vec<_> = pages.flatten().map(|entry| entry.path()).collect();
    let name = |path: &PathBuf| path.file_name().and_then(|name| name.to_str()).map(String::from);
    pages.retain(|path| name(path).is_some_and(|name| name.ends_with(".md") && wanted(&name)));
    pages.sort();
    let mut ran = 0;
    for page in pages {
        let folder = all.join(page.file_stem().unwrap());
        fs::create_dir_all(folder.join("target")).unwrap();
        fs::create_dir_all(all.join("home")).unwrap();
        symlink(root().join("examples"), folder.join("examples")).unwrap();
        symlink(&wheels, folder.join("target/wheels")).unwrap();
        fs::copy(root().join("examples/c/put.c"), folder.join("program.c")).unwrap();
        let reader = Reader { folder, home: all.join("home"), wheels: wheels.clone() };
        let text = fs::read_to_string(&page).unwrap();
        let mut lines = Vec::new();
        'page: for block in marked(&text) {
            match block {
                Marked::Save(name, content) => fs::write(reader.folder.join(name), content).unwrap(),
                Marked::Run(block) => lines = block,
            }
            for line in lines.drain(..) {
                if let Some(reason) = reader.lacks(line) {
                    skip(&format!("the rest of {}: {reason}", page.display()));
                    break 'page;
                }
                let Output { status, stdout, stderr } = reader.run(line);
                let [out, err] = [&stdout, &stderr].map(|bytes| String::from_utf8_lossy(bytes));
                // A doctor that finds something says so by its exit status, too.
                let findings =
                    line.contains("pushgate doctor") && out.replace('_', " ").contains("not applicable");
                assert!(
                    status.success() || (findings && status.code() <= Some(2)),
                    "{}: {line}\n{status}\n{out}\n{err}",
                    page.display()
                );
                ran += 1;
            }
        }
    }
    assert!(ran >= least, "{ran} lines");
}

#[test]
fn marks_name_the_lines_of_the_block_that_follows() {
    let page = "text\n<!-- run 1 3 -->\n```\na\nb\nc\n```\n```\nnot marked\n```\n<!-- run -->\n  ```sh\n  d\n  ```\n\
                <!-- a remark -->\n<!-- save a.c -->\n```c\nint a;\n\nint b;\n```\n";
    let saved = Marked::Save("a.c", "int a;\n\nint b;\n".into());
    assert_eq!(marked(page), [Marked::Run(vec!["a", "c"]), Marked::Run(vec!["  d"]), saved]);
}
