//! Commands of the documentation are run as they stand: a reader copies whole lines.
//!
//! `<!-- run 1 3 -->` before a block names the lines of the block that are run, in a shell, one after the other and in one folder; without
//! numbers all are. Lines that need a GPU, a NIC, a second host or a file of the reader's are not named. What a line of `pushgate`
//! names as flags is looked at in all blocks (`command.rs`).

use std::path::Path;
use std::process::{Command, Output};
use std::time::Duration;
use std::{env, fs};

use pushgate::settings::PluginSettings;
use pushgate_tests::built::{example, pushgate, root, scratch};
use pushgate_tests::skip;

/// The lines of a page that are to be run, by block.
fn marked(page: &str) -> Vec<Vec<&str>> {
    let mut found = Vec::new();
    let lines: Vec<_> = page.lines().collect();
    for (at, line) in lines.iter().enumerate() {
        let Some(mark) = line.trim().strip_prefix("<!-- run").and_then(|rest| rest.strip_suffix("-->"))
        else {
            continue;
        };
        let numbers: Vec<usize> =
            mark.split_whitespace().map(|n| n.parse().expect("a line's number")).collect();
        let fence = |line: &str| line.trim_start().starts_with("```");
        assert!(lines.get(at + 1).is_some_and(|next| fence(next)), "a mark is before a block: {line}");
        let block: Vec<_> = lines[at + 2..].iter().copied().take_while(|line| !fence(line)).collect();
        found.push(match &numbers[..] {
            [] => block,
            some => some.iter().map(|n| block[n - 1]).collect(),
        });
    }
    found
}

/// Runs a line in a folder, as a reader's shell would.
fn run(line: &str, folder: &Path) -> Output {
    let places = [pushgate().parent().unwrap().to_path_buf(), example("allreduce").parent().unwrap().into()];
    let path = env::join_paths(places.into_iter().chain(env::split_paths(&env::var_os("PATH").unwrap())));
    let limit = Duration::from_secs(60).as_secs().to_string();
    let mut shell = Command::new("timeout");
    shell.args(["--kill-after=5", &limit, "bash", "-o", "pipefail", "-c", line]).current_dir(folder);
    for key in PluginSettings::keys() {
        shell.env_remove(key.variable());
    }
    shell.env("PATH", path.unwrap()).env("PUSHGATE_DEVICE", "cpu").env("XDG_CACHE_HOME", folder);
    shell.output().unwrap()
}

#[test]
fn marked_lines_of_the_documentation_succeed_as_they_stand() {
    let Ok(pages) = fs::read_dir(root().join("docs")) else {
        return skip("this bundle has no documentation");
    };
    let folder = scratch(env!("CARGO_TARGET_TMPDIR")).join("pages");
    let mut ran = 0;
    for page in
        pages.flatten().map(|entry| entry.path()).filter(|path| path.extension().is_some_and(|e| e == "md"))
    {
        let folder = folder.join(page.file_stem().unwrap());
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(&folder).unwrap();
        for line in marked(&fs::read_to_string(&page).unwrap()).concat() {
            let Output { status, stdout, stderr } = run(line, &folder);
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
    // The test is of use only if it finds lines.
    assert!(ran >= 15, "{ran} lines");
}

#[test]
fn marks_name_the_lines_of_the_block_that_follows() {
    let page = "text\n<!-- run 1 3 -->\n```\na\nb\nc\n```\n```\nnot marked\n```\n<!-- run -->\n  ```sh\n  d\n  ```\n";
    assert_eq!(marked(page), [vec!["a", "c"], vec!["  d"]]);
}
