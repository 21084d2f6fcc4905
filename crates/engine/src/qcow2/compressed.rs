//! Reading compressed clusters.
//!
//! A compressed cluster is a byte range of the file with no alignment at all; it may end in the
//! middle of the file's last block. Deflate streams are raw and have no checksum; zstd clusters may
//! consist of several frames. Whatever follows the stream in its last sector is not looked at.

use flate2::{Decompress, FlushDecompress, Status};
use stillpoint_format::qcow2::compressed::CompressedCluster;
use stillpoint_format::qcow2::header::CompressionType;
use stillpoint_io::{Queue, Result, Segments};

use super::{Done, Qcow2};

impl Qcow2 {
    /// Reads `into.len()` bytes from byte `in_cluster` of a compressed cluster on.
    pub(crate) async fn read_compressed(
        &self,
        queue: &Queue,
        cluster: CompressedCluster,
        in_cluster: usize,
        into: &Segments,
    ) -> Done {
        let range = cluster.byte_range();
        let align = u64::from(self.file.facts().request_align);
        let start = range.start / align * align;
        let end = range.end.next_multiple_of(align);
        let bytes = Segments::alloc((end - start) as usize);
        self.file.read(queue, start, bytes.clone()).await?;
        let from = (range.start - start) as usize;
        let compressed = bytes.slice(from..from + (range.end - range.start) as usize).to_vec();
        let plain = self
            .decompress(&compressed)
            .map_err(|why| self.corrupt("decompress a cluster", range.start, why))?;
        into.copy_from(&plain[in_cluster..in_cluster + into.len()]);
        Ok(())
    }

    /// A whole cluster out of its compressed bytes.
    fn decompress(&self, compressed: &[u8]) -> Result<Vec<u8>, String> {
        let size = self.cluster_size() as usize;
        match self.header.compression_type {
            CompressionType::Zlib => inflate_deflate(compressed, size),
            CompressionType::Zstd => inflate_zstd(compressed, size),
        }
    }
}

fn inflate_deflate(compressed: &[u8], size: usize) -> Result<Vec<u8>, String> {
    let mut plain = vec![0; size];
    let mut stream = Decompress::new(false);
    let status = stream
        .decompress(compressed, &mut plain, FlushDecompress::Finish)
        .map_err(|error| error.to_string())?;
    let produced = stream.total_out() as usize;
    if produced != size {
        return Err(format!("its deflate stream holds {produced} bytes of {size} ({status:?})"));
    }
    debug_assert!(matches!(status, Status::StreamEnd | Status::Ok | Status::BufError));
    Ok(plain)
}

fn inflate_zstd(compressed: &[u8], size: usize) -> Result<Vec<u8>, String> {
    use zstd::stream::raw::{Decoder, InBuffer, Operation, OutBuffer};
    let mut plain = vec![0; size];
    let mut decoder = Decoder::new().map_err(|error| error.to_string())?;
    let mut input = InBuffer::around(compressed);
    let mut output = OutBuffer::around(plain.as_mut_slice());
    while output.pos() < size {
        let before = (input.pos, output.pos());
        decoder.run(&mut input, &mut output).map_err(|error| error.to_string())?;
        if (input.pos, output.pos()) == before {
            return Err(format!("its zstd frames hold {} bytes of {size}", output.pos()));
        }
    }
    Ok(plain)
}
