//! Serves a text by HTTP/1.1: GET /metrics, one request for each connection.
//!
//! The parser is httparse's. A few threads accept and answer; a connection that is not done within [`LIMIT`] is closed, so
//! one that says nothing holds a thread no longer than that, and no request takes more memory than [`HEAD`] and the answer.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use httparse::{EMPTY_HEADER, Request, Status};

use crate::output::outln;

/// Threads that answer.
const THREADS: usize = 4;
/// The most bytes of a request's head.
const HEAD: usize = 8192;
/// The most headers of a request.
const HEADERS: usize = 64;
/// How long a request may take to come, and each write of the answer.
const LIMIT: Duration = Duration::from_secs(5);

/// What a server answers from.
type Text<'a> = &'a (dyn Fn() -> Result<String> + Sync);

/// Serves `text`, made anew for each request, until the process ends.
pub fn serve(address: SocketAddr, text: Text<'_>) -> Result<()> {
    let listener = TcpListener::bind(address).with_context(|| format!("listening at {address}"))?;
    outln!("listening at http://{}/metrics", listener.local_addr()?)?;
    std::thread::scope(|scope| {
        (0..THREADS).for_each(|_| drop(scope.spawn(|| accept(&listener, text))));
    });
    Err(anyhow!("no thread answers any more"))
}

fn accept(listener: &TcpListener, text: Text<'_>) {
    loop {
        match listener.accept() {
            // What a client does not take is the client's loss.
            Ok((stream, _)) => drop(answer(stream, text)),
            // A connection that was reset, or no descriptor to spare for a while.
            Err(_) => std::thread::sleep(Duration::from_millis(10)),
        }
    }
}

fn answer(mut stream: TcpStream, text: Text<'_>) -> io::Result<()> {
    stream.set_write_timeout(Some(LIMIT))?;
    let (status, body) = match request(&mut stream)? {
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
    write!(
        stream,
        "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{body}"
    )
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
fn request(stream: &mut TcpStream) -> io::Result<Asked> {
    let (mut head, mut length, until) = ([0; HEAD], 0, Instant::now() + LIMIT);
    loop {
        let left = until.checked_duration_since(Instant::now()).filter(|left| !left.is_zero());
        stream.set_read_timeout(Some(left.ok_or(io::ErrorKind::TimedOut)?))?;
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
    use super::*;

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
}
