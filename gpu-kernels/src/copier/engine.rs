//! The copier's thread that copies: it takes commands from the rings of all clients, checks them, and hands them to the device.
//!
//! Each pass looks at each ring once: it says which copies are complete, and takes what waits there, up to a group ([`GROUP`] copies,
//! [`BYTES`]). So a lone copy is handed over at once, and while copies wait they share the calls of the driver.

use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::SyncSender;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use pushgate_driver_shim::bell::Bell;
use pushgate_driver_shim::eventfd::EventFd;
use pushgate_driver_shim::limited;
use pushgate_driver_shim::memory::SharedMemory;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::hands::{GROUP, Line, Stopped};
use super::layout::{Layout, RINGS, SLOTS};
use super::places::{Checked, Kind, Place, Places};
use super::wake;
use crate::lock::lock;

/// Bytes after which a group ends. What waits for a group's first copy waits for the whole group; shorter groups leave gaps between
/// the copies (docs/copier.md).
const BYTES: u64 = 1 << 20;
/// How long the thread looks for commands without a pause after the last one.
const SPIN: Duration = Duration::from_micros(200);
/// How long after the last command it gives way to other threads between its looks, before it sleeps.
const YIELD: Duration = Duration::from_millis(3);
/// How long it sleeps between its looks where the device has had copies for longer than [`YIELD`] and no other command comes.
const CHECK: Duration = Duration::from_micros(100);
/// How long it sleeps at most.
const SLEEP: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };

/// A client, as the thread knows it.
pub(super) struct Client {
    pub id: u64,
    pub memory: Arc<SharedMemory>,
    pub bell: Bell,
    pub lines: [Line; RINGS],
    pub cursors: [u64; RINGS],
    pub places: Places,
    /// The client's socket, to end the conversation of a client that broke the rules.
    pub stream: UnixStream,
    /// The client broke the rules: its rings are not looked at any more.
    pub ended: bool,
}

/// What other threads have for the thread that copies. Each answer goes over the channel.
pub(super) enum News {
    Joined(Box<Client>),
    /// A memory of a client: its key, or nothing if the client is gone or has too many.
    Add(u64, Kind, Place, SyncSender<Option<u32>>),
    /// A key of a client: the memory that it named.
    Remove(u64, Kind, u32, SyncSender<Option<Place>>),
    /// A client leaves. Its copies that were handed over may still be under way.
    Left(u64, SyncSender<Option<Box<Client>>>),
}

/// How other threads reach the thread that copies.
pub(super) struct Mailbox {
    news: Mutex<Vec<News>>,
    any: AtomicBool,
    wake: EventFd,
    /// The thread is to end.
    stop: AtomicBool,
    /// The thread has ended: nobody answers.
    abandoned: AtomicBool,
}

impl Mailbox {
    pub fn new() -> std::io::Result<Self> {
        let [any, stop, abandoned] = [const { AtomicBool::new(false) }; 3];
        Ok(Mailbox { news: Mutex::default(), any, wake: EventFd::new()?, stop, abandoned })
    }

    pub fn post(&self, news: News) {
        lock(&self.news).push(news);
        // The thread takes the lock when it sees this, and then finds the news. If it is asleep the ring wakes it.
        self.any.store(true, Ordering::Release);
        self.wake.ring();
    }

    /// Whether nobody answers any more.
    pub fn is_abandoned(&self) -> bool {
        self.abandoned.load(Ordering::Acquire)
    }

    pub fn stop(&self) {
        self.stop.store(true, Ordering::Release);
        self.wake.ring();
    }
}

/// The thread's state.
pub(super) struct Engine {
    mailbox: Arc<Mailbox>,
    clients: Vec<Client>,
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.mailbox.abandoned.store(true, Ordering::Release);
    }
}

/// What a look at a ring came to.
enum Look {
    Nothing,
    Progress,
    Refused(String),
}

impl Engine {
    pub fn new(mailbox: Arc<Mailbox>) -> Self {
        Engine { mailbox, clients: Vec::new() }
    }

    /// Copies until [`Mailbox::stop`]. An error is the device's, which has failed; all clients have been told.
    pub fn run(mut self) -> Result<(), String> {
        let alone = thread::available_parallelism().is_ok_and(|cores| cores.get() == 1);
        let mut last = Instant::now();
        let mut failed = None;
        while !self.mailbox.stop.load(Ordering::Acquire) && failed.is_none() {
            self.hear();
            match self.pass() {
                Ok(true) => {
                    last = Instant::now();
                    continue;
                }
                Ok(false) => {}
                Err(why) => failed = Some(why),
            }
            let idle = last.elapsed();
            if idle < SPIN && !alone {
                std::hint::spin_loop();
            } else if idle < YIELD {
                thread::yield_now();
            } else {
                if self.sleep() {
                    last = Instant::now();
                }
            }
        }
        let Some(why) = failed else { return Ok(()) };
        for client in &self.clients {
            Layout(&client.memory).stop(&why);
        }
        Err(why)
    }

    /// Does what other threads have asked for.
    fn hear(&mut self) {
        if !self.mailbox.any.swap(false, Ordering::Acquire) {
            return;
        }
        let news = std::mem::take(&mut *lock(&self.mailbox.news));
        for news in news {
            // A thread that no longer waits for its answer drops what it gets.
            match news {
                News::Joined(client) => self.clients.push(*client),
                News::Add(id, kind, place, answer) => {
                    let _ = answer.send(self.client(id).and_then(|c| c.places.add(kind, place)));
                }
                News::Remove(id, kind, key, answer) => {
                    let _ = answer.send(self.client(id).and_then(|c| c.places.remove(kind, key)));
                }
                News::Left(id, answer) => {
                    let at = self.clients.iter().position(|client| client.id == id);
                    let _ = answer.send(at.map(|at| Box::new(self.clients.swap_remove(at))));
                }
            }
        }
    }

    fn client(&mut self, id: u64) -> Option<&mut Client> {
        self.clients.iter_mut().find(|client| client.id == id)
    }

    /// Looks at each ring once. False if nothing came of it.
    fn pass(&mut self) -> Result<bool, String> {
        let mut any = false;
        let mut refused = None;
        for (at, client) in self.clients.iter_mut().enumerate().filter(|(_, client)| !client.ended) {
            for ring in 0..RINGS {
                match client.look(ring)? {
                    Look::Nothing => {}
                    Look::Progress => any = true,
                    Look::Refused(why) => refused = Some((at, why)),
                }
            }
        }
        if let Some((at, why)) = refused {
            self.clients[at].end(&why);
        }
        Ok(any)
    }

    /// Sleeps until a client posts, or another thread has news. False if nobody rang.
    fn sleep(&mut self) -> bool {
        wake::announce(self.clients.iter().map(|client| Layout(&client.memory).asleep()));
        let waits = |client: &Client| {
            let layout = Layout(&client.memory);
            !client.ended && (0..RINGS).any(|ring| wake::has_more(layout.tail(ring), client.cursors[ring]))
        };
        let mut rung = self.mailbox.any.load(Ordering::Relaxed) || self.clients.iter().any(waits);
        if !rung {
            let mut fds = vec![PollFd::new(&self.mailbox.wake, PollFlags::IN)];
            fds.extend(
                self.clients
                    .iter()
                    .filter_map(|c| Some(PollFd::from_borrowed_fd(c.bell.fd()?, PollFlags::IN))),
            );
            let limit = match self.clients.iter().any(|client| client.under_way()) {
                true => Timespec { tv_sec: 0, tv_nsec: CHECK.as_nanos() as i64 },
                false => SLEEP,
            };
            rung = poll(&mut fds, Some(&limit)).is_ok_and(|ready| ready > 0);
            self.mailbox.wake.drain();
        }
        for client in &self.clients {
            Layout(&client.memory).asleep().store(0, Ordering::Relaxed);
            client.bell.drain();
        }
        rung
    }
}

impl Client {
    /// Whether the device has copies of this client.
    fn under_way(&self) -> bool {
        self.lines.iter().any(Line::is_busy)
    }

    /// Says which copies of a ring are complete, and hands its next group to the device. An error is the device's.
    fn look(&mut self, ring: usize) -> Result<Look, String> {
        let (layout, line) = (Layout(&self.memory), &mut self.lines[ring]);
        let complete = line.advance().map_err(|e| e.to_string())?;
        if let Some(complete) = complete {
            // Release: the copies are complete before a client sees the mark (`hands.rs`).
            layout.mark(ring).store(complete, Ordering::Release);
        }
        let idle = if complete.is_some() { Look::Progress } else { Look::Nothing };
        let cursor = self.cursors[ring];
        // Acquire: pairs with the release in `wake::publish`.
        let posted = layout.tail(ring).load(Ordering::Acquire).wrapping_sub(cursor);
        if posted > SLOTS {
            return Ok(Look::Refused(format!("{posted} commands in a ring of {SLOTS}")));
        }
        if posted == 0 || !line.has_room() {
            return Ok(idle);
        }
        let nothing = Checked { out: false, device: 0, host: 0, length: 0 };
        let (mut group, mut count, mut bytes) = ([nothing; GROUP], 0, 0);
        while count < GROUP.min(posted as usize) && bytes < BYTES {
            match self.places.check(&layout.read(ring, cursor + count as u64)) {
                Ok(copy) => group[count] = copy,
                Err(why) => return Ok(Look::Refused(why)),
            }
            bytes += group[count].length;
            count += 1;
        }
        let end = cursor + count as u64;
        // SAFETY: checked above against the client's memories, which are let go of only once the line is finished (`serve.rs`).
        match unsafe { line.copy(&group[..count], end) } {
            Ok(()) => {
                self.cursors[ring] = end;
                Ok(Look::Progress)
            }
            Err(Stopped::Client(why)) => Ok(Look::Refused(why)),
            Err(Stopped::Device(why)) => Err(why),
        }
    }

    /// Copies no more for a client that broke the rules: the client is told why, and its socket ends, so that its thread sees to the
    /// rest.
    fn end(&mut self, why: &str) {
        limited!(warn, 0u32, "a client's command is refused, so its copies end: {why}");
        Layout(&self.memory).stop(why);
        self.ended = true;
        let _ = self.stream.shutdown(std::net::Shutdown::Both);
    }
}
