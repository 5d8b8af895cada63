//! The ranks of a scenario and the bytes that they exchange beside the plugin, as over NCCL's bootstrap network: rank 0 has a
//! stream to every other rank.

use std::io::{ErrorKind, Read, Write};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::process::{Child, Command, ExitStatus};
use std::time::Instant;

use super::scenario::Options;
use crate::{Pause, hang};

/// The variable that tells a process of a scenario where rank 0 listens, and its own rank.
const VARIABLE: &str = "NCCL_CALLER_GROUP";

/// A rank's end of the bootstrap network.
pub struct Group {
    /// The rank.
    pub rank: usize,
    /// The number of ranks.
    pub ranks: usize,
    /// Rank 0: to each other rank that is left. Else: to rank 0.
    streams: Vec<Option<UnixStream>>,
}

impl Group {
    fn new(rank: usize, ranks: usize, streams: Vec<UnixStream>) -> Self {
        for stream in &streams {
            stream.set_nonblocking(true).expect("a stream that does not wait");
        }
        Group { rank, ranks, streams: streams.into_iter().map(Some).collect() }
    }

    /// The groups of `ranks` threads.
    pub fn threads(ranks: usize) -> Vec<Group> {
        let pairs = (1..ranks).map(|_| UnixStream::pair().expect("a socket pair"));
        let (first, others): (Vec<_>, Vec<_>) = pairs.unzip();
        let others = others.into_iter().enumerate().map(|(i, stream)| Group::new(i + 1, ranks, vec![stream]));
        std::iter::once(Group::new(0, ranks, first)).chain(others).collect()
    }

    /// Starts the other ranks as processes that run the same scenario, each with the variables of `more`.
    pub fn processes(o: &Options, scenario: &str) -> (Group, Vec<Child>) {
        let name = format!("pushgate/nccl-caller/{}/group", std::process::id());
        let address = SocketAddr::from_abstract_name(&name).expect("a name");
        let listener = UnixListener::bind_addr(&address).expect("a listening socket");
        listener.set_nonblocking(true).expect("a listening socket that does not wait");
        let mut children: Vec<Child> = (1..o.ranks)
            .map(|rank| {
                let mut command = Command::new(std::env::current_exe().expect("our own path"));
                command.args(["rma", scenario]).args(o.arguments()).env(VARIABLE, format!("{name} {rank}"));
                command.spawn().expect("another rank")
            })
            .collect();
        let mut streams: Vec<Option<UnixStream>> = (1..o.ranks).map(|_| None).collect();
        let begin = Instant::now();
        while streams.iter().any(Option::is_none) {
            match listener.accept() {
                Ok((mut stream, _)) => {
                    let mut rank = [0];
                    stream.set_nonblocking(false).expect("a stream that waits");
                    stream.read_exact(&mut rank).expect("a rank's number");
                    streams[usize::from(rank[0]) - 1] = Some(stream);
                    continue;
                }
                Err(e) if e.kind() == ErrorKind::WouldBlock => {}
                Err(e) => panic!("accepting another rank: {e}"),
            }
            for child in &mut children {
                if let Some(status) = child.try_wait().expect("wait") {
                    panic!("a rank ended before it was connected: {status}");
                }
            }
            assert!(begin.elapsed() < hang(), "the other ranks do not connect");
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        (Group::new(0, o.ranks, streams.into_iter().flatten().collect()), children)
    }

    /// The group of this process, if rank 0 started it.
    pub fn of_parent(o: &Options) -> Option<Group> {
        let value = std::env::var(VARIABLE).ok()?;
        crate::nccl::scenario::die_with_parent();
        let (name, rank) = value.split_once(' ').expect("a name and a rank");
        let rank: u8 = rank.parse().expect("a rank");
        let address = SocketAddr::from_abstract_name(name).expect("a name");
        let mut stream = UnixStream::connect_addr(&address).expect("rank 0");
        stream.write_all(&[rank]).expect("rank 0");
        Some(Group::new(rank.into(), o.ranks, vec![stream]))
    }

    /// Leaves a rank that is gone out of every later exchange. To be called on rank 0.
    pub fn without(&mut self, rank: usize) {
        self.streams[rank - 1] = None;
    }

    /// Exchanges as many bytes with every rank, and calls `idle` while it waits. What a rank that was left out has told is
    /// empty.
    pub fn all_gather(&mut self, own: &[u8], idle: &mut dyn FnMut()) -> Vec<Vec<u8>> {
        let n = own.len();
        if self.rank > 0 {
            let stream = self.streams[0].as_mut().expect("a stream to rank 0");
            write(stream, own, idle);
            let mut all = vec![0; (n + 1) * self.ranks];
            read(stream, &mut all, 0, idle);
            return all.chunks(n + 1).map(|told| told[..n * usize::from(told[n])].to_vec()).collect();
        }
        let mut all = vec![own.to_vec()];
        for (i, stream) in self.streams.iter_mut().enumerate() {
            let mut told = Vec::new();
            if let Some(stream) = stream {
                told = vec![0; n];
                read(stream, &mut told, i + 1, idle);
            }
            all.push(told);
        }
        // A rank that was left out: zeros, and the mark that they mean nothing.
        let line = |told: &Vec<u8>| {
            let mut line = told.clone();
            line.resize(n, 0);
            line.push(u8::from(n == 0 || !told.is_empty()));
            line
        };
        let answer: Vec<u8> = all.iter().flat_map(line).collect();
        for stream in self.streams.iter_mut().flatten() {
            write(stream, &answer, idle);
        }
        all
    }

    /// Waits until every rank is here, and calls `idle` meanwhile.
    pub fn barrier(&mut self, idle: &mut dyn FnMut()) {
        self.all_gather(b"!", idle);
    }
}

fn read(stream: &mut UnixStream, bytes: &mut [u8], from: usize, idle: &mut dyn FnMut()) {
    let (begin, pause, mut got) = (Instant::now(), Pause::default(), 0);
    while got < bytes.len() {
        match stream.read(&mut bytes[got..]) {
            Ok(0) => panic!("rank {from} is gone"),
            Ok(n) => got += n,
            Err(e) if e.kind() == ErrorKind::WouldBlock => {
                assert!(begin.elapsed() < hang(), "rank {from} does not come to a common place");
                idle();
                pause.after(false);
            }
            Err(e) => panic!("rank {from}: {e}"),
        }
    }
}

fn write(stream: &mut UnixStream, bytes: &[u8], idle: &mut dyn FnMut()) {
    let mut sent = 0;
    while sent < bytes.len() {
        match stream.write(&bytes[sent..]) {
            Ok(n) => sent += n,
            Err(e) if e.kind() == ErrorKind::WouldBlock => idle(),
            Err(e) => panic!("another rank is gone: {e}"),
        }
    }
}

/// Waits for processes of [`Group::processes`].
pub fn ended(children: Vec<Child>) -> Vec<ExitStatus> {
    children.into_iter().map(|mut child| child.wait().expect("another rank")).collect()
}
