//! Encryption of a connection: TLS 1.3 with a key of this process alone, which nobody has signed.
//!
//! Any key is taken: the proof of the secret covers what both ends know of the encryption, so one who encrypts with each end
//! apart is found out.

use std::io::{self, ErrorKind, IoSlice, IoSliceMut, Read, Write};
use std::net::TcpStream;
use std::sync::{Arc, OnceLock};

use ring::rand::SystemRandom;
use ring::signature::Ed25519KeyPair;
use rustls::client::Resumption;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{ring as provider, verify_tls13_signature_with_raw_key};
use rustls::pki_types::{CertificateDer, PrivatePkcs8KeyDer, ServerName, SubjectPublicKeyInfoDer, UnixTime};
use rustls::server::{AlwaysResolvesServerRawPublicKeys, NoServerSessionStorage};
use rustls::sign::CertifiedKey;
use rustls::version::TLS13;
use rustls::{ClientConfig, Connection, DigitallySignedStruct, ServerConfig, SignatureScheme};

use super::plain::{recv_plain, send_plain};

/// The label under which both ends take out what they know of the encryption.
const LABEL: &[u8] = b"EXPORTER-pushgate-door";

/// The two roles' settings, with one key of this process.
struct Configs {
    client: Arc<ClientConfig>,
    server: Arc<ServerConfig>,
}

impl Configs {
    fn make() -> Result<Configs, rustls::Error> {
        let crypto = Arc::new(provider::default_provider());
        let random = |_| rustls::Error::FailedToGetRandomBytes;
        let key = Ed25519KeyPair::generate_pkcs8(&SystemRandom::new()).map_err(random)?;
        let key = provider::sign::any_eddsa_type(&PrivatePkcs8KeyDer::from(key.as_ref()))?;
        let public = key.public_key().expect("an Ed25519 key has a public one").to_vec();
        let own = Arc::new(CertifiedKey::new(vec![CertificateDer::from(public)], key));
        let mut server = ServerConfig::builder_with_provider(crypto.clone())
            .with_protocol_versions(&[&TLS13])?
            .with_no_client_auth()
            .with_cert_resolver(Arc::new(AlwaysResolvesServerRawPublicKeys::new(own)));
        // No connection goes on from another one's keys.
        (server.session_storage, server.send_tls13_tickets) = (Arc::new(NoServerSessionStorage {}), 0);
        let mut client = ClientConfig::builder_with_provider(crypto)
            .with_protocol_versions(&[&TLS13])?
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(AnyKey))
            .with_no_client_auth();
        (client.resumption, client.enable_sni) = (Resumption::disabled(), false);
        Ok(Configs { client: Arc::new(client), server: Arc::new(server) })
    }

    fn get() -> Result<&'static Configs, rustls::Error> {
        static CONFIGS: OnceLock<Result<Configs, rustls::Error>> = OnceLock::new();
        CONFIGS.get_or_init(Configs::make).as_ref().map_err(Clone::clone)
    }
}

/// Takes any key, whose owner must use it. Whether that is the right one, the proof of the secret tells.
#[derive(Debug)]
struct AnyKey;

impl ServerCertVerifier for AnyKey {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Err(rustls::Error::General("TLS 1.2 is not spoken here".into()))
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        key: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = provider::default_provider().signature_verification_algorithms;
        let key = SubjectPublicKeyInfoDer::from(key.as_ref());
        verify_tls13_signature_with_raw_key(message, &key, signature, &algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        vec![SignatureScheme::ED25519]
    }

    fn requires_raw_public_keys(&self) -> bool {
        true
    }
}

/// The encryption of one connection.
pub(super) struct Tls(Connection);

/// A socket as rustls reads and writes it.
struct Socket<'a>(&'a TcpStream);

impl Read for Socket<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        recv_plain(self.0, &mut [IoSliceMut::new(bytes)])
    }
}

impl Write for Socket<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        send_plain(self.0, &[IoSlice::new(bytes)])
    }

    fn write_vectored(&mut self, bytes: &[IoSlice<'_>]) -> io::Result<usize> {
        send_plain(self.0, bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn failed(e: rustls::Error) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, format!("TLS: {e}"))
}

impl Tls {
    /// An encryption that has not begun.
    pub(super) fn new(dials: bool) -> io::Result<Tls> {
        let configs = Configs::get().map_err(failed)?;
        let connection = if dials {
            let name = ServerName::try_from("pushgate").expect("it is a name");
            rustls::ClientConnection::new(configs.client.clone(), name).map(Connection::from)
        } else {
            rustls::ServerConnection::new(configs.server.clone()).map(Connection::from)
        };
        connection.map(Tls).map_err(failed)
    }

    /// Goes on with the set-up. True once both ends have done their part.
    pub(super) fn set_up(&mut self, socket: &TcpStream) -> io::Result<bool> {
        loop {
            if !self.flush(socket)? {
                return Ok(false);
            }
            if !self.0.is_handshaking() {
                return Ok(true);
            }
            match self.take_in(socket) {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(_) => {}
                Err(e) if e.kind() == ErrorKind::WouldBlock => return Ok(false),
                Err(e) => return Err(e),
            }
        }
    }

    /// 32 bytes that both ends of this encryption can compute, and nobody else.
    pub(super) fn binding(&self) -> io::Result<[u8; 32]> {
        self.0.export_keying_material([0; 32], LABEL, None).map_err(failed)
    }

    /// Reads what has arrived. Ok(0): the end.
    fn take_in(&mut self, socket: &TcpStream) -> io::Result<usize> {
        let n = self.0.read_tls(&mut Socket(socket))?;
        if let Err(e) = self.0.process_new_packets() {
            // The other end is told why.
            let _ = self.flush(socket);
            return Err(failed(e));
        }
        Ok(n)
    }

    /// Sends what is encrypted. True when nothing is left.
    pub(super) fn flush(&mut self, socket: &TcpStream) -> io::Result<bool> {
        while self.0.wants_write() {
            match self.0.write_tls(&mut Socket(socket)) {
                Ok(_) => {}
                Err(e) if e.kind() == ErrorKind::WouldBlock => return Ok(false),
                Err(e) => return Err(e),
            }
        }
        Ok(true)
    }

    pub(super) fn wants_write(&self) -> bool {
        self.0.wants_write()
    }

    pub(super) fn send(&mut self, socket: &TcpStream, bytes: &[IoSlice<'_>]) -> io::Result<usize> {
        if !self.flush(socket)? {
            return Err(ErrorKind::WouldBlock.into());
        }
        let n = self.0.writer().write_vectored(bytes)?;
        // What the socket does not take now waits; the bytes count as sent.
        self.flush(socket)?;
        Ok(n)
    }

    pub(super) fn recv(&mut self, socket: &TcpStream, bytes: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        loop {
            let mut all = 0;
            for to in bytes.iter_mut() {
                match self.0.reader().read(to) {
                    Ok(n) => all += n,
                    Err(_) if all > 0 => return Ok(all),
                    Err(e) if e.kind() == ErrorKind::WouldBlock => break,
                    Err(e) => return Err(e),
                }
                if all == 0 {
                    // Nothing was asked for, or the other end has said that this is the end.
                    return Ok(0);
                }
            }
            if all > 0 {
                return Ok(all);
            }
            self.take_in(socket)?;
        }
    }

    /// Whether bytes wait here that the socket does not report.
    pub(super) fn has_bytes(&mut self) -> bool {
        // Looks at what was read from the socket before; reads nothing.
        self.0.process_new_packets().is_ok_and(|state| state.plaintext_bytes_to_read() > 0)
    }

    /// Says that this end sends nothing more.
    pub(super) fn close(&mut self, socket: &TcpStream) {
        self.0.send_close_notify();
        let _ = self.flush(socket);
    }
}
