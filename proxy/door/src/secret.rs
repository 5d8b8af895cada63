//! What two ends know and others do not.

use std::fs::OpenOptions;
use std::io::Read;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;

use ring::hmac;
use ring::rand::{SecureRandom, SystemRandom};
use rustix::fs::OFlags;
use zeroize::Zeroizing;

/// The environment variable that holds a secret.
pub const VARIABLE: &str = "PUSHGATE_SECRET";
/// The fewest bytes of a secret.
const LEAST: usize = 16;
/// The most bytes of a secret's file.
const MOST: u64 = 4096;

/// A secret that never shows in a log. Copies share its memory, which is zeroed when the last one goes.
#[derive(Clone)]
pub struct Secret {
    bytes: Arc<Zeroizing<Vec<u8>>>,
    /// Everybody knows it.
    public: bool,
}

/// Why there is no secret. The text never has a byte of it.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct SecretError(String);

impl Secret {
    /// The secret of ends that have none: everybody knows it, so it proves nothing. A [`super::Door`] with it listens at
    /// addresses of the loopback device alone.
    pub fn public() -> Secret {
        let bytes = Zeroizing::new(b"pushgate without a secret".to_vec());
        Secret { bytes: Arc::new(bytes), public: true }
    }

    /// Whether this is the secret that everybody knows.
    pub fn is_public(&self) -> bool {
        self.public
    }

    /// Takes these bytes as a secret. Fails if there are fewer than 16.
    pub fn new(bytes: &[u8]) -> Result<Secret, SecretError> {
        if bytes.len() < LEAST {
            let text =
                format!("has {} bytes, expected at least {LEAST}: take `openssl rand -hex 32`", bytes.len());
            return Err(SecretError(text));
        }
        Ok(Secret { bytes: Arc::new(Zeroizing::new(bytes.to_vec())), public: false })
    }

    /// Reads a secret from a file, without white space around it. The file must belong to this user or to root, and nobody
    /// else may read or write it.
    pub fn from_file(path: &Path) -> Result<Secret, SecretError> {
        let failed = |e: std::io::Error| SecretError(format!("can't be read: {e}"));
        // NONBLOCK: a named pipe must not hold up its reader.
        let flags = (OFlags::NONBLOCK | OFlags::CLOEXEC).bits() as i32;
        let file = OpenOptions::new().read(true).custom_flags(flags).open(path).map_err(failed)?;
        let data = file.metadata().map_err(failed)?;
        if !data.is_file() {
            return Err(SecretError("is no regular file".into()));
        }
        // In a user namespace a number may stand for many users. This process has opened a file that its owner alone may read,
        // so it is that owner.
        let (user, mode) = (rustix::process::geteuid().as_raw(), data.mode() & 0o7777);
        if data.uid() != user && data.uid() != 0 {
            let text =
                format!("belongs to user {}, expected this one or root: `chown {user}` it", data.uid());
            return Err(SecretError(text));
        }
        if mode & 0o177 != 0 {
            let text = format!("has mode {mode:04o}, expected 0600 or less: `chmod 600` it");
            return Err(SecretError(text));
        }
        let mut bytes = Zeroizing::new(Vec::with_capacity(MOST as usize + 1));
        file.take(MOST + 1).read_to_end(&mut bytes).map_err(failed)?;
        if bytes.len() as u64 > MOST {
            return Err(SecretError(format!("has more than {MOST} bytes")));
        }
        Secret::new(bytes.trim_ascii())
    }

    /// Reads a secret from `PUSHGATE_SECRET`, without white space around it; `None` if the variable is not set.
    pub fn from_environment() -> Result<Option<Secret>, SecretError> {
        let Some(value) = std::env::var_os(VARIABLE) else { return Ok(None) };
        let value = Zeroizing::new(value.into_encoded_bytes());
        Secret::new(value.trim_ascii()).map(Some)
    }

    /// Makes a secret of `N` random bytes, at least 16. Returns the bytes too, for the other end.
    pub fn random<const N: usize>() -> std::io::Result<(Secret, [u8; N])> {
        const { assert!(N >= LEAST, "a secret has at least 16 bytes") };
        let mut bytes = [0; N];
        random(&mut bytes)?;
        Ok((Secret { bytes: Arc::new(Zeroizing::new(bytes.to_vec())), public: false }, bytes))
    }

    /// A secret that follows from this one and a label. Nobody finds this one by it.
    pub fn derive(&self, label: &[u8]) -> Secret {
        let derived = hmac::sign(&self.key(), label).as_ref().to_vec();
        Secret { bytes: Arc::new(Zeroizing::new(derived)), public: self.public }
    }

    /// Bytes that follow from this secret and a label, at most 32. Nobody finds the secret by them.
    pub fn bytes<const N: usize>(&self, label: &[u8]) -> [u8; N] {
        const { assert!(N <= 32, "as long as an HMAC-SHA256") };
        hmac::sign(&self.key(), label).as_ref()[..N].try_into().expect("as many")
    }

    pub(super) fn key(&self) -> hmac::Key {
        hmac::Key::new(hmac::HMAC_SHA256, &self.bytes)
    }
}

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(if self.public { "Secret(public)" } else { "Secret(..)" })
    }
}

/// Fills `bytes` with random ones.
pub(super) fn random(bytes: &mut [u8]) -> std::io::Result<()> {
    SystemRandom::new().fill(bytes).map_err(|_| std::io::Error::other("the kernel gives no random bytes"))
}

#[cfg(test)]
mod tests {
    use std::fs::Permissions;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_secret_shows_in_no_text() {
        let secret = Secret::new(b"correct horse battery").unwrap();
        let text = format!("{secret:?} {:?}", secret.derive(b"mesh"));
        assert_eq!(text, "Secret(..) Secret(..)");
        let short = Secret::new(b"correct horse").unwrap_err().to_string();
        assert!(short.contains("has 13 bytes, expected at least 16") && !short.contains("horse"), "{short}");
    }

    #[test]
    fn derived_secrets_differ_by_label_and_by_secret() {
        let [a, b] = [&[1; 16], &[2; 16]].map(|bytes| Secret::new(bytes).unwrap());
        let all = [a.derive(b"x"), a.derive(b"y"), b.derive(b"x"), a.clone()];
        for (i, one) in all.iter().enumerate() {
            assert!(all[i + 1..].iter().all(|other| other.bytes != one.bytes));
        }
        assert_eq!(a.derive(b"x").bytes, all[0].bytes);
        assert_eq!(a.bytes::<16>(b"x"), all[0].bytes[..16]);
        let ((c, bytes), (d, _)) = (Secret::random::<32>().unwrap(), Secret::random::<32>().unwrap());
        assert!(c.bytes != d.bytes && c.bytes[..] == bytes);
    }

    #[test]
    fn p8_a_secrets_file_that_others_may_read_is_refused_with_the_remedy() {
        let folder = std::env::temp_dir().join(format!("pushgate-secret-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let path = folder.join("secret");
        let write = |text: &[u8], mode: u32| {
            let _ = std::fs::remove_file(&path);
            std::fs::write(&path, text).unwrap();
            std::fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
            Secret::from_file(&path)
        };
        let refused = |text: &[u8], mode: u32| write(text, mode).unwrap_err().to_string();
        for mode in [0o600, 0o400] {
            let secret = write(b"\n 0123456789abcdef \n", mode).unwrap();
            assert_eq!(&secret.bytes[..], b"0123456789abcdef");
            assert!(!secret.is_public());
        }
        for mode in [0o640, 0o604, 0o620, 0o700] {
            let e = refused(&[b'x'; 32], mode);
            assert_eq!(e, format!("has mode {mode:04o}, expected 0600 or less: `chmod 600` it"));
        }
        assert!(refused(b"0123456789abcde\n\n", 0o600).contains("has 15 bytes"));
        assert!(refused(&[b'x'; 5000], 0o600).contains("more than 4096"));
        assert!(Secret::from_file(&folder).unwrap_err().to_string().contains("no regular file"));
        let e = Secret::from_file(&folder.join("none")).unwrap_err().to_string();
        assert!(e.starts_with("can't be read: No such file"), "{e}");
        // Root alone can give a file away.
        if write(&[b'x'; 32], 0o600).is_ok() && std::os::unix::fs::chown(&path, Some(12345), None).is_ok() {
            let e = Secret::from_file(&path).unwrap_err().to_string();
            assert!(e.starts_with("belongs to user 12345, expected this one or root"), "{e}");
        }
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
