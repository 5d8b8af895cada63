//! `pushgate proxy`: an engine for each program of this user that runs with proxy = process.

use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::process::ExitCode;

use anyhow::Result;
use clap::ArgMatches;
use pushgate::Settings;
use pushgate::proxy::{Stop, run_and_tell};

use crate::{exit, signals};

/// Serves until SIGINT, SIGTERM or SIGHUP. Then the socket goes, and every program's queue pairs end
/// with *aborted*.
pub fn run(m: &ArgMatches, settings: &Settings) -> Result<ExitCode> {
    for key in Settings::KEYS.iter().filter(|key| !["proxy_socket", "stall_report"].contains(&key.name)) {
        if let Ok(Some(_)) = m.try_get_one::<String>(&key.flag()) {
            eprintln!(
                "pushgate proxy: warning: {} has no effect: each program brings its own settings",
                key.flag()
            );
        }
    }
    let stop = Stop::new()?;
    signals::catch(Some(stop.try_clone()?));
    let socket = &settings.proxy_socket;
    run_and_tell(settings, stop, || {
        eprintln!("pushgate proxy: serving at {}", socket.display());
        notify(&format!("READY=1\nSTATUS=serving at {}", socket.display()));
    })?;
    notify("STOPPING=1");
    // SIGTERM is how a service is ended: no failure.
    Ok(match signals::caught() {
        None | Some(signals::TERMINATE) => ExitCode::SUCCESS,
        Some(number) => ExitCode::from(exit::of_signal(number)),
    })
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
        eprintln!("pushgate proxy: the service manager at {} was not told: {e}", name.display());
    }
}
