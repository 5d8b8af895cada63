//! Limits of this process in words: what to do where a call of the system fails by one.

use std::io;

use rustix::io::Errno;
use rustix::process::{Resource, Rlimit, getrlimit};

/// What helps where a call failed by a limit: which limit it is, how far the process may raise it, and by which command. `None`
/// where the error is of another kind.
pub fn remedy(error: &io::Error) -> Option<String> {
    let reached = |what: &str, resource, command: &str| Some(reached(what, getrlimit(resource), command));
    match Errno::from_io_error(error)? {
        Errno::MFILE => reached("open files", Resource::Nofile, "ulimit -n"),
        Errno::NFILE => {
            Some("the host has as many files open as it may: raise the sysctl fs.file-max".into())
        }
        Errno::FBIG => reached("file sizes (shared memory counts)", Resource::Fsize, "ulimit -f"),
        Errno::NOMEM if getrlimit(Resource::As).current.is_some() => {
            reached("address space", Resource::As, "ulimit -v")
        }
        Errno::NOMEM => Some(
            "the host or the control group is short of memory: raise the memory limit, or ask for less"
                .into(),
        ),
        _ => None,
    }
}

/// What helps where no thread could be started, as [`remedy`] says for other calls.
pub fn of_thread(error: &io::Error) -> Option<String> {
    match Errno::from_io_error(error)? {
        Errno::AGAIN => {
            let limit = reached("this user's threads", getrlimit(Resource::Nproc), "ulimit -u");
            Some(format!("{limit}; a control group may have a limit of its own (pids.max)"))
        }
        _ => remedy(error),
    }
}

/// A remedy as the end of a message; nothing without one.
pub fn added(remedy: Option<String>) -> String {
    remedy.map_or(String::new(), |remedy| format!("; {remedy}"))
}

fn reached(what: &str, limit: Rlimit, command: &str) -> String {
    let number = |limit: Option<u64>| limit.map_or("unlimited".into(), |n| n.to_string());
    let current = number(limit.current);
    match limit.current == limit.maximum {
        true => {
            format!("the limit of {what} is {current}, and an administrator alone can raise it ({command})")
        }
        false => {
            let most = number(limit.maximum);
            format!("the limit of {what} is {current}, and this process may raise it to {most} ({command})")
        }
    }
}

/// Fails where a file of this process may not have `bytes` bytes. A call that makes a file longer than that is answered with
/// SIGXFSZ, which ends the process without a word.
pub(crate) fn check_file_size(bytes: usize) -> io::Result<()> {
    match getrlimit(Resource::Fsize).current {
        Some(most) if bytes as u64 > most => Err(Errno::FBIG.into()),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_that_may_be_raised_says_how_far_and_one_that_may_not_says_who_can() {
        let limit = |current, maximum| reached("open files", Rlimit { current, maximum }, "ulimit -n");
        assert_eq!(
            limit(Some(24), Some(4096)),
            "the limit of open files is 24, and this process may raise it to 4096 (ulimit -n)"
        );
        assert_eq!(
            limit(Some(24), None),
            "the limit of open files is 24, and this process may raise it to unlimited (ulimit -n)"
        );
        assert_eq!(
            limit(Some(24), Some(24)),
            "the limit of open files is 24, and an administrator alone can raise it (ulimit -n)"
        );
    }

    #[test]
    fn each_limit_has_the_remedy_of_its_number() {
        let said = |errno: Errno| remedy(&errno.into());
        assert!(said(Errno::MFILE).unwrap().contains("ulimit -n"));
        assert!(said(Errno::NFILE).unwrap().contains("fs.file-max"));
        assert!(said(Errno::FBIG).unwrap().contains("ulimit -f"));
        assert!(said(Errno::NOMEM).is_some());
        // A file or a sandbox refuses by these: the call knows why.
        assert_eq!([Errno::PERM, Errno::ACCESS, Errno::INVAL].map(said), [None, None, None]);
        assert_eq!(remedy(&io::Error::other("no number")), None);
    }
}
