//! The guest's first file system: a cpio archive in the format "newc", which the kernel unpacks.

/// An archive that is being made.
#[derive(Default)]
pub struct Archive {
    bytes: Vec<u8>,
    entries: u32,
}

const FOLDER: u32 = 0o040_755;
const PROGRAM: u32 = 0o100_755;

impl Archive {
    /// Adds a folder; its parent must exist already.
    pub fn folder(&mut self, name: &str) {
        self.entry(name, FOLDER, &[]);
    }

    /// Adds an executable file.
    pub fn file(&mut self, name: &str, content: &[u8]) {
        self.entry(name, PROGRAM, content);
    }

    /// Returns the archive with its end mark.
    pub fn finish(mut self) -> Vec<u8> {
        self.entry("TRAILER!!!", 0, &[]);
        self.bytes
    }

    fn entry(&mut self, name: &str, mode: u32, content: &[u8]) {
        self.entries += 1;
        let size = u32::try_from(content.len()).expect("no file of 4 GiB goes into an initramfs");
        let name_size = name.len() as u32 + 1;
        // Inode, mode, user, group, links, time, size, twice two device numbers, length of the
        // name, no checksum.
        let fields = [self.entries, mode, 0, 0, 1, 0, size, 0, 0, 0, 0, name_size, 0];
        self.bytes.extend_from_slice(b"070701");
        for field in fields {
            self.bytes.extend_from_slice(format!("{field:08X}").as_bytes());
        }
        self.bytes.extend_from_slice(name.as_bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend_from_slice(content);
        self.pad();
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_names_and_contents_are_padded() {
        let mut archive = Archive::default();
        archive.folder("a");
        archive.file("a/bc", b"12345");
        let bytes = archive.finish();
        assert_eq!(bytes.len() % 4, 0);
        assert_eq!(&bytes[..22], b"07070100000001000041ED");
        // 110 bytes of header and "a\0" make 112.
        assert_eq!(&bytes[112..118], b"070701");
        let file = &bytes[112..];
        assert_eq!(&file[54..62], b"00000005");
        assert_eq!(&file[94..102], b"00000005");
        assert_eq!(&file[110..116], b"a/bc\0\0");
        assert_eq!(&file[116..124], b"12345\0\0\0");
        assert_eq!(&file[124 + 110..124 + 120], b"TRAILER!!!");
    }
}
