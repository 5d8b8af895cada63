//! Tests a program of the proxy process that is killed while a child that it forked holds its
//! connection.

use std::io::{BufRead, BufReader};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use pushgate_driver_shim::eventfd::EventFd;
use pushgate_service::remote::RemoteEngine;
use pushgate_service::server::{ServerOptions, bind, serve};
use pushgate_service::wire::{self, Reply, Request};
use pushgate_tests::hang;
use rustix::process::{Pid, Signal, kill_process};

unsafe extern "C" {
    safe fn fork() -> i32;
    safe fn sleep(seconds: u32) -> u32;
    safe fn _exit(code: i32) -> !;
}

/// Writes requests on a program's connection as fast as they are accepted, so that the server
/// always finds one. Another process reads the answers, and ends when the server closes the
/// connection.
fn write(stream: &UnixStream) {
    if fork() == 0 {
        while wire::recv::<Reply>(stream).is_ok() {}
        _exit(0)
    }
    while wire::send(stream, &Request::Counters, &[]).is_ok() {}
}

/// What the process of the tests below does: it is a program with an engine, which forks a child
/// that sleeps or writes.
#[test]
#[ignore = "a process that the test of this file starts"]
fn role() {
    let socket = std::env::var("FORKED_SOCKET").expect("started by the test of this file");
    let stream = wire::dial(socket.as_ref(), Instant::now() + hang()).unwrap();
    let _engine = RemoteEngine::over(stream.try_clone().unwrap(), "forks").unwrap();
    match fork() {
        // The child has the connection too.
        0 => {
            if std::env::var_os("FORKED_WRITES").is_some() {
                write(&stream);
            }
            sleep(3600);
            _exit(0)
        }
        pid => println!("@{pid}"),
    }
    sleep(3600);
}

/// A program and its child; dropping this kills both.
struct Program(Child, Option<Pid>);

impl Drop for Program {
    fn drop(&mut self) {
        if let Some(sleeper) = self.1 {
            let _ = kill_process(sleeper, Signal::KILL);
        }
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn p7_a_program_that_is_killed_is_gone_though_its_forked_child_holds_the_connection() {
    is_gone("sleeps");
}

#[test]
fn p7_a_program_that_is_killed_is_gone_though_its_forked_child_writes_on_the_connection() {
    is_gone("writes");
}

/// Kills a program whose child sleeps or writes, and checks that the server lets go of the program.
fn is_gone(child: &str) {
    let socket = format!("@pushgate-forked-{child}-{}", std::process::id());
    let (listener, _file) = bind(socket.as_ref()).unwrap();
    let stop = EventFd::new().unwrap();
    let mut options = ServerOptions::new(stop.try_clone().unwrap());
    // Room for a second program shows that the first one is gone.
    options.max_clients = 1;
    let server = std::thread::spawn(move || serve(listener, options));

    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "role", "--ignored", "--nocapture", "--test-threads=1"]);
    command.env("FORKED_SOCKET", &socket).stdin(Stdio::null()).stdout(Stdio::piped());
    if child == "writes" {
        command.env("FORKED_WRITES", "yes");
    }
    let mut program = Program(command.spawn().unwrap(), None);
    let mut says = BufReader::new(program.0.stdout.take().unwrap());
    let mut line = String::new();
    while !line.contains('@') {
        line.clear();
        assert!(says.read_line(&mut line).unwrap() > 0, "the program has ended");
    }
    let pid = line.split_once('@').unwrap().1.trim().parse().unwrap();
    program.1 = Pid::from_raw(pid);

    assert!(RemoteEngine::connect(socket.as_ref(), "early").is_err(), "the program has the only place");
    program.0.kill().unwrap();
    let begin = Instant::now();
    while RemoteEngine::connect(socket.as_ref(), "next").is_err() {
        assert!(begin.elapsed() < hang(), "the server holds on to a program that is dead");
        std::thread::sleep(Duration::from_millis(5));
    }
    stop.ring();
    server.join().unwrap().unwrap();
}
