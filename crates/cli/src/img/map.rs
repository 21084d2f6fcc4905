//! `map`: what lies where, over the whole backing chain.

use std::io::{BufWriter, Write};

use clap::Args;
use stillpoint_engine::offline::map::{Extent, Map};
use stillpoint_host::{Cache, HostFiles};
use stillpoint_io::{Error, Queue, Result};

use super::{Complaint, Ending, ImageArgs, Output, Target, finish, run_on_loop, text};
use crate::Tool;

/// Tell what lies where, over the whole backing chain
#[derive(Args)]
pub struct MapArgs {
    #[command(flatten)]
    image: ImageArgs,

    /// Where on the disk to begin
    #[arg(long, value_name = "OFFSET")]
    start_offset: Option<String>,

    /// How much of the disk to look at
    #[arg(long, value_name = "LENGTH")]
    max_length: Option<String>,

    /// How the extents are printed
    #[arg(long, default_value = "human")]
    output: Output,
}

pub fn run(args: &MapArgs, tool: Tool) -> Result<u8> {
    let mut range = [0, u64::MAX];
    let given = [("start offset", &args.start_offset), ("max length", &args.max_length)];
    for ((what, given), value) in given.into_iter().zip(&mut range) {
        let Some(given) = given else { continue };
        match text::parse_size(given) {
            Some(bytes) => *value = bytes,
            None => {
                errln!("{}: Invalid {what} specified: '{given}'.", tool.name());
                return Ok(1);
            }
        }
    }
    let ending = args.image.target().and_then(|target| {
        run_on_loop(Cache::Writeback, async |queue, files| {
            print_map(&queue, files, &target, range, args.output, tool).await
        })
    });
    finish(tool, "map", ending)
}

async fn print_map(
    queue: &Queue,
    files: HostFiles,
    target: &Target,
    [start, length_max]: [u64; 2],
    output: Output,
    tool: Tool,
) -> Ending {
    let opening = Complaint::opening(&target.name);
    let map = Map::open(queue, &files, &target.name, target.format, target.access).await;
    let mut map = map.map_err(&opening)?;
    let end = map.size().min(start.saturating_add(length_max));
    let mut printer =
        Printer { out: BufWriter::new(std::io::stdout()), output, is_first: true, tool };
    let printed = |error: std::io::Error| opening(Error::from_std("print the map", &error));

    printer.begin().map_err(printed)?;
    let mut current = Extent::nothing_at(start);
    while current.start + current.length < end {
        let from = current.start + current.length;
        let next = map.extent(queue, from, end - from).await.map_err(&opening)?;
        if current.length > 0 && current.is_continued_by(&next) {
            current.length += next.length;
            continue;
        }
        if current.length > 0 && !printer.extent(&map, &current).map_err(printed)? {
            return Ok(1);
        }
        current = next;
    }
    // An empty range is an empty extent, in JSON at least.
    if (current.length > 0 || output == Output::Json)
        && !printer.extent(&map, &current).map_err(printed)?
    {
        return Ok(1);
    }
    printer.end().map_err(printed)?;
    Ok(0)
}

struct Printer<W: Write> {
    out: W,
    output: Output,
    is_first: bool,
    tool: Tool,
}

impl<W: Write> Printer<W> {
    fn begin(&mut self) -> std::io::Result<()> {
        match self.output {
            Output::Human => {
                writeln!(self.out, "{:<16}{:<16}{:<16}File", "Offset", "Length", "Mapped to")
            }
            Output::Json => write!(self.out, "["),
        }
    }

    /// Prints an extent; `false` if it is one that the table for people has no words for.
    fn extent(&mut self, map: &Map, extent: &Extent) -> std::io::Result<bool> {
        match self.output {
            Output::Human if extent.data && !extent.zero => match extent.offset {
                Some(offset) => {
                    let number = |value: u64| match value {
                        0 => "0".to_owned(),
                        value => format!("{value:#x}"),
                    };
                    let [start, length, offset] = [extent.start, extent.length, offset].map(number);
                    let file = map.host_file(extent.depth);
                    writeln!(self.out, "{start:<16}{length:<16}{offset:<16}{file}")?;
                }
                None => {
                    self.out.flush()?;
                    errln!(
                        "{}: File contains external, encrypted or compressed clusters.",
                        self.tool.name()
                    );
                    return Ok(false);
                }
            },
            Output::Human => {}
            Output::Json => {
                let separator = if self.is_first { "" } else { ",\n" };
                write!(
                    self.out,
                    "{separator}{{ \"start\": {}, \"length\": {}, \"depth\": {}, \"present\": {}, \
                     \"zero\": {}, \"data\": {}, \"compressed\": {}",
                    extent.start,
                    extent.length,
                    extent.depth,
                    extent.present,
                    extent.zero,
                    extent.data,
                    extent.compressed
                )?;
                if let Some(offset) = extent.offset {
                    write!(self.out, ", \"offset\": {offset}")?;
                }
                write!(self.out, "}}")?;
                self.is_first = false;
            }
        }
        Ok(true)
    }

    fn end(&mut self) -> std::io::Result<()> {
        if self.output == Output::Json {
            writeln!(self.out, "]")?;
        }
        self.out.flush()
    }
}
