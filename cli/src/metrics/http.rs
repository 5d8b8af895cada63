//! Serves a text by HTTP/1.1: GET /metrics, one request for each connection.
//!
//! The parser is httparse's. A connection has [`LIMIT`] for its request and as long for its answer, however slowly its client sends
//! or reads. There are [`PLACES`] of them; where all are taken the oldest one ends, so clients that stay keep no other one out. No
//! request takes more memory than [`HEAD`] and the answer.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use httparse::{EMPTY_HEADER, Request, Status};

use crate::output::outln;

/// Connections at a time.
const PLACES: usize = 16;
/// The most bytes of a request's head.
const HEAD: usize = 8192;
/// The most headers of a request.
const HEADERS: usize = 64;
/// How long a request may take to come, and how long an answer to be taken.
const LIMIT: Duration = Duration::from_secs(5);

/// What a server answers from.
type Text<'a> = &'a (dyn Fn() -> Result<String> + Sync);

/// Serves `text`, made anew for each request, until the process ends.
pub fn serve(address: SocketAddr, text: Text<'_>) -> Result<()> {
    let listener = TcpListener::bind(address).with_context(|| format!("listening at {address}"))?;
    outln!("listening at http://{}/metrics", listener.local_addr()?)?;
    accept(&listener, text, LIMIT)
}

/// Answers connections, each on a thread of its own, without end. `limit` is for a request, and for an answer.
fn accept(listener: &TcpListener, text: Text<'_>, limit: Duration) -> Result<()> {
    let places = Places::default();
    std::thread::scope(|scope| {
        loop {
            match listener.accept() {
                Ok((stream, _)) => {
                    let place = places.take(stream);
                    // What a client does not take is the client's loss, and so is a thread that can't be started.
                    let work = move || drop(answer(&place.stream, text, limit));
                    let _ = std::thread::Builder::new().spawn_scoped(scope, work);
                }
                // A connection that was reset, or no descriptor to spare for a while.
                Err(_) => std::thread::sleep(Duration::from_millis(10)),
            }
        }
    })
}

/// The connections that are being answered, in the order of their arrival.
#[derive(Default)]
struct Places {
    taken: Mutex<VecDeque<Arc<TcpStream>>>,
    left: Condvar,
}

/// A connection that has a place.
struct Place<'a> {
    stream: Arc<TcpStream>,
    places: &'a Places,
}

impl Places {
    fn taken(&self) -> MutexGuard<'_, VecDeque<Arc<TcpStream>>> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a place. Where there is none, the oldest connection ends, and its place is waited for.
    fn take(&self, stream: TcpStream) -> Place<'_> {
        let (stream, mut taken) = (Arc::new(stream), self.taken());
        if taken.len() >= PLACES {
            // Its thread waits for its client no more.
            let _ = taken[0].shutdown(Shutdown::Both);
            let full = |taken: &mut VecDeque<_>| taken.len() >= PLACES;
            taken = self.left.wait_while(taken, full).unwrap_or_else(PoisonError::into_inner);
        }
        taken.push_back(stream.clone());
        Place { stream, places: self }
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.places.taken().retain(|stream| !Arc::ptr_eq(stream, &self.stream));
        self.places.left.notify_one();
    }
}

fn answer(stream: &TcpStream, text: Text<'_>, limit: Duration) -> io::Result<()> {
    let (status, body) = match request(stream, Instant::now() + limit)? {
        Asked::Metrics => match text() {
            Ok(text) => ("200 OK", text),
            Err(e) => ("500 Internal Server Error", format!("{e:#}\n")),
        },
        Asked::Other => ("404 Not Found", "the metrics are at /metrics\n".into()),
        Asked::Method => ("405 Method Not Allowed", "only GET is answered\n".into()),
        Asked::Wrong => ("400 Bad Request", "no request of HTTP/1\n".into()),
    };
    let kind = if status.starts_with("200") { prometheus::TEXT_FORMAT } else { "text/plain" };
    let length = body.len();
    let all = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{body}"
    );
    let (mut rest, until) = (all.as_bytes(), Instant::now() + limit);
    while !rest.is_empty() {
        stream.set_write_timeout(Some(left(until)?))?;
        match (&mut &*stream).write(rest) {
            Ok(n) => rest = &rest[n..],
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

/// The time that is left.
fn left(until: Instant) -> io::Result<Duration> {
    let left = until.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(left) }
}

/// What a request asks for.
#[derive(Debug, PartialEq, Eq)]
enum Asked {
    Metrics,
    Other,
    Method,
    Wrong,
}

/// Reads a request's head.
fn request(mut stream: &TcpStream, until: Instant) -> io::Result<Asked> {
    let (mut head, mut length) = ([0; HEAD], 0);
    loop {
        stream.set_read_timeout(Some(left(until)?))?;
        match stream.read(&mut head[length..])? {
            // The end, or no room for more.
            0 => return Ok(Asked::Wrong),
            more => length += more,
        }
        if let Some(asked) = parse(&head[..length]) {
            return Ok(asked);
        }
    }
}

/// What a head asks for. `None`: it goes on.
fn parse(head: &[u8]) -> Option<Asked> {
    let mut headers = [EMPTY_HEADER; HEADERS];
    let mut request = Request::new(&mut headers);
    match request.parse(head) {
        Ok(Status::Partial) => None,
        Err(_) => Some(Asked::Wrong),
        Ok(Status::Complete(_)) if request.method != Some("GET") => Some(Asked::Method),
        Ok(Status::Complete(_)) => {
            let path = request.path.unwrap_or_default();
            let path = path.split('?').next().unwrap_or_default();
            Some(if path == "/metrics" { Asked::Metrics } else { Asked::Other })
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use pushgate_tests::fuzz::{depth, fuzz, kind};

    use super::*;

    /// A limit that no test waits for.
    const AGES: Duration = Duration::from_secs(100_000);

    fn listener() -> (TcpListener, SocketAddr) {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let at = listener.local_addr().unwrap();
        (listener, at)
    }

    /// What a client gets for a request.
    fn get(at: SocketAddr) -> String {
        let mut stream = TcpStream::connect(at).unwrap();
        stream.set_read_timeout(Some(pushgate_tests::hang())).unwrap();
        stream.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").unwrap();
        io::read_to_string(stream).unwrap()
    }

    #[test]
    fn p8_clients_that_say_nothing_keep_no_other_client_out() {
        let (listener, at) = listener();
        std::thread::spawn(move || accept(&listener, &|| Ok("the text".into()), AGES));
        let mut silent: Vec<_> = (0..3 * PLACES).map(|_| TcpStream::connect(at).unwrap()).collect();
        for n in 0..PLACES {
            assert!(get(at).ends_with("\r\n\r\nthe text"), "{n}");
        }
        // The oldest made room, without an answer.
        silent[0].set_read_timeout(Some(pushgate_tests::hang())).unwrap();
        assert_eq!(silent[0].read(&mut [0]).unwrap_or(0), 0);
    }

    #[test]
    fn p8_a_client_that_reads_byte_by_byte_has_no_more_time_for_the_whole_answer() {
        let (listener, at) = listener();
        let mut client = TcpStream::connect(at).unwrap();
        client.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").unwrap();
        let (stream, _) = listener.accept().unwrap();
        // More than the kernel keeps for both ends.
        let text = || Ok("x".repeat(64 << 20));
        let answered = std::thread::spawn(move || answer(&stream, &text, Duration::from_millis(300)));
        let begin = Instant::now();
        // So much that each write of the answer goes on soon.
        let mut some = vec![0; 64 << 10];
        while !answered.is_finished() {
            assert!(begin.elapsed() < pushgate_tests::hang());
            assert!(client.read(&mut some).unwrap() > 0, "its answer has ended");
            std::thread::sleep(Duration::from_millis(1));
        }
        let e = answered.join().unwrap().unwrap_err();
        assert!(matches!(e.kind(), io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock), "{e}");
    }

    #[test]
    fn p8_a_client_that_sends_byte_by_byte_has_no_more_time_for_the_whole_request() {
        let (listener, at) = listener();
        let mut client = TcpStream::connect(at).unwrap();
        let (stream, _) = listener.accept().unwrap();
        let answered =
            std::thread::spawn(move || answer(&stream, &|| Ok(String::new()), Duration::from_millis(100)));
        let begin = Instant::now();
        client.write_all(b"GET /").unwrap();
        while !answered.is_finished() {
            assert!(begin.elapsed() < pushgate_tests::hang());
            let _ = client.write_all(b"m");
            std::thread::sleep(Duration::from_millis(1));
        }
        let e = answered.join().unwrap().unwrap_err();
        assert!(matches!(e.kind(), io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock), "{e}");
    }

    #[test]
    fn a_request_is_told_from_what_is_none() {
        let asked = |text: &str| parse(text.as_bytes());
        assert_eq!(asked("GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"), Some(Asked::Metrics));
        assert_eq!(asked("GET /metrics?x=y HTTP/1.0\r\n\r\n"), Some(Asked::Metrics));
        assert_eq!(asked("GET / HTTP/1.1\r\n\r\n"), Some(Asked::Other));
        assert_eq!(asked("GET /metricsx HTTP/1.1\r\n\r\n"), Some(Asked::Other));
        assert_eq!(asked("POST /metrics HTTP/1.1\r\n\r\n"), Some(Asked::Method));
        assert_eq!(asked("GET /metrics HTTP/1.1\r\nHost"), None);
        assert_eq!(asked("\u{16}\u{3}\u{1}"), Some(Asked::Wrong));
        let many = "a: b\r\n".repeat(HEADERS + 1);
        assert_eq!(asked(&format!("GET /metrics HTTP/1.1\r\n{many}\r\n")), Some(Asked::Wrong));
    }

    #[test]
    #[ignore = "the step fuzz runs this"]
    fn p8_fuzz_no_bytes_of_a_client_make_the_reader_of_requests_panic_or_take_room() {
        let texts = [
            "GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n",
            "GET / HTTP/1.0\r\nA: b\r\n\r\n",
            "POST /metrics?x HTTP/1.1\r\n\r\n",
        ];
        assert_eq!(parse(texts[0].as_bytes()), Some(Asked::Metrics));
        let seeds = texts.map(|text| text.as_bytes().to_vec());
        fuzz(&seeds, |bytes| {
            let head = &bytes[..bytes.len().min(HEAD)];
            let asked = parse(head);
            if asked == Some(Asked::Metrics) {
                assert!(head.windows(8).any(|at| at == b"/metrics"));
            }
            kind(format!("{asked:?}")) ^ depth(head.len())
        });
    }
}
