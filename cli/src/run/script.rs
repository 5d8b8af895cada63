//! What a shell is told to do for one rank. The shell reads it from its standard input, so no variable is seen in the
//! arguments of a process, on this host or on another one.
//!
//! The shell keeps that input as a lifeline: once it is closed, because the run ends all ranks or has ended itself, or
//! because the connection to the host is lost, the rank gets SIGTERM, and SIGKILL after [`GRACE`].

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::time::Duration;

/// How long a rank may take to end after SIGTERM.
pub const GRACE: Duration = Duration::from_secs(5);
/// The longest script. A new pipe holds that much, so that writing it does not wait.
pub const LONGEST: usize = 60 << 10;

/// A script that runs a program in a folder with variables.
pub fn script(folder: &OsStr, variables: &[(OsString, OsString)], program: &[OsString]) -> Vec<u8> {
    let mut text = Vec::new();
    // The braces have the shell read all of it before it does anything.
    text.extend_from_slice(b"{\nexec 3<&0 </dev/null\ncd ");
    quote(&mut text, folder);
    text.extend_from_slice(b" || exit 127\n");
    for (name, value) in variables {
        text.extend_from_slice(b"export ");
        text.extend_from_slice(name.as_bytes());
        text.push(b'=');
        quote(&mut text, value);
        text.push(b'\n');
    }
    text.extend_from_slice(b"set --");
    for argument in program {
        text.push(b' ');
        quote(&mut text, argument);
    }
    // In a process group of its own, so that what the program started ends with it. The group is there a moment after the
    // process. What the shell itself says of signals is left out. Once the lifeline is closed the watch outlives the
    // rank, for what the rank started and SIGTERM did not end.
    let wait = format!(
        "
exec 4>&2 2>/dev/null
if command -v setsid >/dev/null 2>&1; then
  setsid \"$@\" 3<&- 2>&4 4>&- & rank=$! group=-$!
else
  \"$@\" 3<&- 2>&4 4>&- & rank=$! group=$!
fi
{{
  while read -r line; do :; done
  trap '' TERM
  kill -s TERM -- \"$group\" || kill -s TERM -- \"$rank\"
  sleep {}
  kill -s KILL -- \"$group\"
}} <&3 >/dev/null 4>&- &
watch=$!
exec 3<&- 4>&-
wait \"$rank\"
status=$?
kill \"$watch\"
exit \"$status\"
}}
",
        GRACE.as_secs()
    );
    text.extend_from_slice(wait.as_bytes());
    text
}

/// Adds a word that the shell takes as it is.
fn quote(text: &mut Vec<u8>, word: &OsStr) {
    text.push(b'\'');
    for byte in word.as_bytes() {
        match byte {
            b'\'' => text.extend_from_slice(b"'\\''"),
            byte => text.push(*byte),
        }
    }
    text.push(b'\'');
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::ffi::OsStringExt;
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn a_shell_passes_every_byte_of_variables_and_arguments_on() {
        // All but NUL, which neither can hold.
        let all = OsString::from_vec((1..=255).collect());
        let variables = [("WORD".into(), all.clone()), ("EMPTY".into(), OsString::new())];
        let program = ["printf", "%s|%s|", "$(x) `y` '\"\\\n*"].map(OsString::from);
        let program = [&program[..], std::slice::from_ref(&all)].concat();
        let mut child = Command::new("sh")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        child.stdin.as_ref().unwrap().write_all(&script("/".as_ref(), &variables, &program)).unwrap();
        // The lifeline stays: the program must end by itself.
        let lifeline = child.stdin.take();
        let output = child.wait_with_output().unwrap();
        drop(lifeline);
        assert!(output.status.success(), "{output:?}");
        let expected = [&b"$(x) `y` '\"\\\n*|"[..], all.as_bytes(), b"|"].concat();
        assert_eq!((output.stdout, output.stderr), (expected, vec![]));
    }

    #[test]
    fn p7_a_program_ends_when_the_lifeline_is_closed() {
        let program = ["sleep", "1000"].map(OsString::from);
        let mut child = Command::new("sh")
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        child.stdin.take().unwrap().write_all(&script("/".as_ref(), &[], &program)).unwrap();
        let begin = std::time::Instant::now();
        while child.try_wait().unwrap().is_none() {
            assert!(begin.elapsed() < pushgate_tests::hang(), "it goes on without its lifeline");
            std::thread::sleep(Duration::from_millis(1));
        }
        // 128 and SIGTERM.
        assert_eq!(child.wait().unwrap().code(), Some(143));
    }
}
