//! The reference: the same messages over bare TCP sockets, as NCCL's Socket network moves them with one helper thread and one socket
//! for each connection. The thread of the replay hands each post to the end's helper thread, which blocks in its socket, and polls a
//! flag. The length goes before the payload, in one call.

use std::collections::VecDeque;
use std::io::{IoSlice, Read as _, Write as _};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use pushgate_net_trace::Role;

use super::memory::Memory;
use super::plugin::Handles;
use super::script::EndPlan;

/// Bytes before a message: its number and its length.
const HEAD: usize = 16;

/// What a helper thread works on.
struct Line {
    /// Posts that the helper has not begun.
    posted: Mutex<VecDeque<usize>>,
    bell: Condvar,
    over: AtomicBool,
    done: Vec<AtomicBool>,
    failed: Mutex<Option<String>>,
}

/// The ends of a process.
pub struct Sockets {
    lines: Vec<(Arc<Line>, TcpStream, JoinHandle<()>)>,
}

/// Listeners of a process.
pub struct Listening(Vec<Option<TcpListener>>);

impl Listening {
    pub fn open(at: IpAddr, ends: &[EndPlan]) -> Result<(Listening, Handles)> {
        let (mut listeners, mut handles) = (Vec::new(), Vec::new());
        for end in ends {
            listeners.push(match end.role {
                Role::Send => None,
                Role::Receive => {
                    let listener =
                        TcpListener::bind((at, 0)).with_context(|| format!("listening at {at}"))?;
                    handles.push((end.connection, listener.local_addr()?.to_string().into_bytes()));
                    Some(listener)
                }
            });
        }
        Ok((Listening(listeners), handles))
    }

    /// Connects all ends, and starts their helper threads.
    pub fn connect(
        self,
        ends: &Arc<Vec<EndPlan>>,
        memories: &Arc<Vec<Memory>>,
        handles: &Handles,
        until: Instant,
    ) -> Result<Sockets> {
        let mut streams = Vec::new();
        for (end, listener) in ends.iter().zip(&self.0) {
            streams.push(match listener {
                Some(listener) => {
                    listener.set_nonblocking(true)?;
                    None
                }
                None => {
                    let found = handles.iter().find(|(connection, _)| *connection == end.connection);
                    let text =
                        String::from_utf8(found.context("a connection nobody listens for")?.1.clone())?;
                    let at: SocketAddr = text.parse().context("an address")?;
                    let limit = until.saturating_duration_since(Instant::now());
                    Some(
                        TcpStream::connect_timeout(&at, limit)
                            .with_context(|| format!("connecting to {at}"))?,
                    )
                }
            });
        }
        for (stream, listener) in streams.iter_mut().zip(&self.0) {
            while stream.is_none() {
                match listener.as_ref().expect("it receives").accept() {
                    Ok((accepted, _)) => {
                        accepted.set_nonblocking(false)?;
                        *stream = Some(accepted);
                    }
                    Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => {
                        ensure!(
                            Instant::now() < until,
                            "a connection of the bare sockets does not come in time"
                        );
                        std::thread::sleep(std::time::Duration::from_millis(1));
                    }
                    Err(e) => return Err(e.into()),
                }
            }
        }
        let mut lines = Vec::new();
        for (end, stream) in streams.into_iter().flatten().enumerate() {
            stream.set_nodelay(true)?;
            let line = Arc::new(Line {
                posted: Mutex::default(),
                bell: Condvar::new(),
                over: AtomicBool::new(false),
                done: ends[end].posts.iter().map(|_| AtomicBool::new(false)).collect(),
                failed: Mutex::default(),
            });
            let (theirs, socket) = (line.clone(), stream.try_clone()?);
            let (ends, memories) = (ends.clone(), memories.clone());
            let helper = std::thread::Builder::new().name(format!("socket-{end}")).spawn(move || {
                let ended = match ends[end].role {
                    Role::Send => theirs.send(&ends[end], &memories[end], socket),
                    Role::Receive => theirs.receive(&ends[end], &memories[end], socket),
                };
                if let Err(e) = ended {
                    *theirs.failed.lock().unwrap_or_else(PoisonError::into_inner) = Some(format!("{e:#}"));
                }
            })?;
            lines.push((line, stream, helper));
        }
        Ok(Sockets { lines })
    }
}

impl Line {
    /// The next post, once there is one; `None` once it is over.
    fn next(&self) -> Option<usize> {
        let mut posted = self.posted.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(post) = posted.pop_front() {
                return Some(post);
            }
            if self.over.load(Ordering::Relaxed) {
                return None;
            }
            posted = self.bell.wait(posted).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn send(&self, end: &EndPlan, memory: &Memory, mut socket: TcpStream) -> Result<()> {
        while let Some(post) = self.next() {
            let part = &end.posts[post].parts[0];
            let mut head = [0; HEAD];
            head[..8].copy_from_slice(&(part.message as u64).to_ne_bytes());
            head[8..].copy_from_slice(&(part.size as u64).to_ne_bytes());
            // SAFETY: within the end's memory; what is sent never changes.
            let payload =
                unsafe { std::slice::from_raw_parts(memory.at(part.offset).cast::<u8>(), part.size) };
            let mut slices = &mut [IoSlice::new(&head), IoSlice::new(payload)][..];
            while slices.iter().any(|slice| !slice.is_empty()) {
                match socket.write_vectored(slices)? {
                    0 => bail!("the socket takes no more"),
                    n => IoSlice::advance_slices(&mut slices, n),
                }
            }
            // Release: the thread that polls sees the post as done after its last byte has left.
            self.done[post].store(true, Ordering::Release);
        }
        Ok(())
    }

    fn receive(&self, end: &EndPlan, memory: &Memory, mut socket: TcpStream) -> Result<()> {
        // Where each message goes.
        let mut places = std::collections::HashMap::new();
        for (post, parts) in end.posts.iter().enumerate() {
            places.extend(parts.parts.iter().map(|part| (part.message, (post, *part))));
        }
        let mut missing: Vec<usize> = end.posts.iter().map(|post| post.parts.len()).collect();
        let mut posted = vec![false; end.posts.len()];
        for message in 0..places.len() {
            let mut head = [0; HEAD];
            match socket.read_exact(&mut head) {
                Err(_) if self.over.load(Ordering::Relaxed) => return Ok(()),
                read => read.context("the other end is gone")?,
            }
            let (post, part) = places[&message];
            while !posted[post] {
                let Some(next) = self.next() else { return Ok(()) };
                posted[next] = true;
            }
            let said =
                |at: std::ops::Range<usize>| u64::from_ne_bytes(head[at].try_into().expect("eight bytes"));
            let found = (said(0..8), said(8..16));
            ensure!(found == (message as u64, part.size as u64), "message {message}: it says {found:?}");
            // SAFETY: within the end's memory; the post's buffer is left alone until the post is done.
            let to =
                unsafe { std::slice::from_raw_parts_mut(memory.at(part.offset).cast::<u8>(), part.size) };
            socket.read_exact(to).context("the other end is gone")?;
            missing[post] -= 1;
            if missing[post] == 0 {
                // Release: the thread that polls sees the bytes that were read before.
                self.done[post].store(true, Ordering::Release);
            }
        }
        Ok(())
    }
}

impl Sockets {
    pub fn post(&self, end: usize, post: usize) {
        let line = &self.lines[end].0;
        line.posted.lock().unwrap_or_else(PoisonError::into_inner).push_back(post);
        line.bell.notify_one();
    }

    pub fn test(&self, end: usize, post: usize) -> Result<bool> {
        let line = &self.lines[end].0;
        // Acquire: see where the helper stores.
        if line.done[post].load(Ordering::Acquire) {
            return Ok(true);
        }
        if self.lines[end].2.is_finished()
            && let Some(why) = &*line.failed.lock().unwrap_or_else(PoisonError::into_inner)
        {
            return Err(anyhow!("bare sockets: {why}"));
        }
        Ok(false)
    }

    pub fn close(self) {
        for (line, stream, helper) in self.lines {
            line.over.store(true, Ordering::Relaxed);
            drop(line.posted.lock());
            line.bell.notify_one();
            // What was sent still arrives.
            let _ = stream.shutdown(std::net::Shutdown::Both);
            let _ = helper.join();
        }
    }
}
