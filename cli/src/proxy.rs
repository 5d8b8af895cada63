//! `pushgate proxy`: an engine for each program that runs with proxy = process.

use std::io;
use std::os::fd::{FromRawFd, IntoRawFd, OwnedFd, RawFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram, UnixListener};
use std::process::ExitCode;

use anyhow::{Result, bail};
use clap::{Arg, ArgAction, ArgMatches, Command};
use pushgate::Settings;
use pushgate::proxy::{Leaves, Stop, Usage, run_as_process, usage};
use pushgate::settings::PluginSettings;
use rustix::io::{FdFlags, fcntl_setfd};
use rustix::net::sockopt::{socket_acceptconn, socket_domain, socket_type};
use rustix::net::{AddressFamily, SocketType};

use crate::output::{errln, outln};
use crate::{exit, flags, signals};

pub fn command(settings: impl Fn(Command) -> Command) -> Command {
    settings(
        Command::new("proxy")
            .about("Serves programs that run with proxy = process: this user's and root's, or those of proxy-serves")
            .arg(Arg::new("status").long("status").action(ArgAction::SetTrue).help(
                "Prints what each user holds of the proxy at proxy-socket, and what one may hold; as root and as the \
                 proxy's user all of them, else yourself",
            ))
            .arg(
                Arg::new("json")
                    .long("json")
                    .action(ArgAction::SetTrue)
                    .requires("status")
                    .help("Prints one JSON object instead"),
            ),
    )
}

/// Serves until SIGINT, SIGTERM or SIGHUP. Then the socket goes. After SIGTERM queue pairs that can go on with another proxy
/// are left for the next one; all others, and all after the other signals, end with *aborted*.
pub fn run(m: &ArgMatches, settings: &Settings) -> Result<ExitCode> {
    if m.get_flag("status") {
        return status(&usage(settings)?, &settings.proxy_socket.display(), m.get_flag("json"));
    }
    for key in PluginSettings::keys().filter(|key| !flags::of_proxy(key)) {
        if let Ok(Some(_)) = m.try_get_one::<String>(&key.flag()) {
            errln!(
                "pushgate proxy: warning: {} has no effect: each program brings its own settings",
                key.flag()
            );
        }
    }
    let stop = Stop::new()?;
    signals::catch(Some(stop.try_clone()?));
    let handed = handed_listener()?;
    let socket = match &handed {
        Some(_) => "the socket of the service manager".into(),
        None => settings.proxy_socket.display().to_string(),
    };
    run_as_process(settings, handed, leaves, stop, || {
        errln!("pushgate proxy: serving at {socket}");
        notify(&format!("READY=1\nSTATUS=serving at {socket}"));
    })?;
    notify("STOPPING=1");
    // SIGTERM is how a service is ended: no failure.
    Ok(match signals::caught() {
        None | Some(signals::TERMINATE) => ExitCode::SUCCESS,
        Some(number) => ExitCode::from(exit::of_signal(number)),
    })
}

/// What becomes of the queue pairs after the signal that was caught.
fn leaves() -> Leaves {
    match signals::caught() {
        Some(signals::TERMINATE) => Leaves::ToTheNext,
        Some(signals::HANG_UP) => Leaves::Ends("was ended by SIGHUP: its terminal is gone"),
        _ => Leaves::Ends("was interrupted (SIGINT)"),
    }
}

fn status(usage: &Usage, socket: &dyn std::fmt::Display, json: bool) -> Result<ExitCode> {
    if json {
        outln!("{}", serde_json::to_string_pretty(usage)?)?;
        return Ok(ExitCode::SUCCESS);
    }
    let most = usage.quota;
    outln!("proxy of user {} at {socket}", usage.proxy)?;
    let mut rows = vec![
        ["user", "programs", "queue pairs", "memory", "descriptors", "processor", "nice"].map(String::from),
        [
            "may have".into(),
            most.programs.to_string(),
            most.queue_pairs.to_string(),
            mebibytes(most.bytes),
            most.descriptors.to_string(),
            "-".into(),
            "-".into(),
        ],
    ];
    rows.extend(usage.users.iter().map(|user| {
        [
            user.uid.to_string(),
            user.held.programs.to_string(),
            user.held.queue_pairs.to_string(),
            mebibytes(user.held.bytes),
            user.held.descriptors.to_string(),
            format!("{:.2} s", user.cpu_ns as f64 / 1e9),
            format!("+{}", user.nice),
        ]
    }));
    let widths: [usize; 7] =
        std::array::from_fn(|column| rows.iter().map(|row| row[column].len()).max().unwrap_or(0));
    for row in rows {
        let cells: Vec<String> =
            row.iter().zip(widths).map(|(cell, width)| format!("{cell:>width$}")).collect();
        outln!("{}", cells.join("  "))?;
    }
    if usage.left_out > 0 {
        outln!("and {} users that hold less", usage.left_out)?;
    }
    Ok(ExitCode::SUCCESS)
}

fn mebibytes(bytes: u64) -> String {
    format!("{:.1} MiB", bytes as f64 / (1 << 20) as f64)
}

/// The listening socket that the service manager has made for this process (sd_listen_fds(3)), if it has.
fn handed_listener() -> Result<Option<UnixListener>> {
    /// The first descriptor that is handed over.
    const FIRST: RawFd = 3;
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u32>().ok());
    if number("LISTEN_PID") != Some(std::process::id()) {
        return Ok(None);
    }
    match number("LISTEN_FDS") {
        None | Some(0) => return Ok(None),
        Some(1) => {}
        Some(n) => {
            bail!("the service manager handed over {n} sockets, expected one: see pushgate-proxy.socket")
        }
    }
    // SAFETY: the service manager has opened the descriptor for this process, as the two variables say, and nothing else in
    // this process knows of it.
    let fd = unsafe { OwnedFd::from_raw_fd(FIRST) };
    let listens = socket_domain(&fd) == Ok(AddressFamily::UNIX)
        && socket_type(&fd) == Ok(SocketType::STREAM)
        && socket_acceptconn(&fd) == Ok(true);
    if !listens {
        // Whatever it is, its owner may want it.
        let _ = fd.into_raw_fd();
        bail!("the service manager handed over something else than a Unix stream socket that listens");
    }
    fcntl_setfd(&fd, FdFlags::CLOEXEC)?;
    Ok(Some(fd.into()))
}

/// Tells the service manager that started this process (sd_notify(3)). Does nothing without one.
fn notify(state: &str) {
    let Some(name) = std::env::var_os("NOTIFY_SOCKET").filter(|name| !name.is_empty()) else { return };
    let send = || -> io::Result<()> {
        let address = match name.as_bytes().strip_prefix(b"@") {
            Some(name) => SocketAddr::from_abstract_name(name)?,
            None => SocketAddr::from_pathname(&name)?,
        };
        UnixDatagram::unbound()?.send_to_addr(state.as_bytes(), &address).map(drop)
    };
    if let Err(e) = send() {
        errln!("pushgate proxy: the service manager at {} was not told: {e}", name.display());
    }
}
