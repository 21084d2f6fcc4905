//! `check`: finds, and repairs, what contradicts itself in an image.

use clap::{Args, ValueEnum};
use serde_json::{Map, Value};
use stillpoint_engine::ImageFormat;
use stillpoint_engine::offline::check::{Finding, Repair, Report, check};
use stillpoint_engine::offline::image::probe_format;
use stillpoint_host::{Cache, HostFiles};
use stillpoint_io::{Access, Files, Kind, Queue, Result};

use super::{Complaint, Ending, ImageArgs, Output, Target, finish, invalid, run_on_loop, text};
use crate::Tool;
use crate::options::{CACHES, choose};

/// Find, and repair, what contradicts itself in an image
///
/// Exit codes: 0 nothing found, or everything repaired; 1 the check could not be done; 2 errors;
/// 3 leaked clusters, and nothing worse; 63 the format has nothing to check.
#[derive(Args)]
pub struct CheckArgs {
    #[command(flatten)]
    image: ImageArgs,

    /// What may be repaired
    #[arg(short, long, value_name = "leaks|all")]
    repair: Option<RepairArg>,

    /// What stands between a repair's writes and the disk
    #[arg(short = 'T', long, value_parser = choose(CACHES), default_value = "writeback")]
    cache: Cache,

    /// How the result is printed
    #[arg(long, default_value = "human")]
    output: Output,

    /// Print findings only
    #[arg(short, long)]
    quiet: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum RepairArg {
    /// Free clusters that nobody refers to
    Leaks,
    /// Repair whatever can be repaired
    All,
}

const CODE_CORRUPT: u8 = 2;
const CODE_LEAKS: u8 = 3;
const CODE_UNSUPPORTED: u8 = 63;

pub fn run(args: &CheckArgs, tool: Tool) -> Result<u8> {
    let ending = (|| {
        let target = args.image.target()?;
        if args.repair.is_some() && target.access == Access::ReadUnlocked {
            return Err(invalid("--repair and --force-share cannot be used together"));
        }
        run_on_loop(args.cache, async |queue, files| {
            check_image(&queue, files, &target, args, tool).await
        })
    })();
    finish(tool, "check", ending)
}

async fn check_image(
    queue: &Queue,
    files: HostFiles,
    target: &Target,
    args: &CheckArgs,
    tool: Tool,
) -> Ending {
    let repair = match args.repair {
        None => Repair::Nothing,
        Some(RepairArg::Leaks) => Repair::Leaks,
        Some(RepairArg::All) => Repair::All,
    };
    let access = if repair == Repair::Nothing { target.access } else { Access::Write };
    let opening = Complaint::opening(&target.name);
    let file = files.open(queue, &target.name, None, access).await.map_err(&opening)?;
    let format = match target.format {
        Some(format) => format,
        None => probe_format(queue, &*file).await.map_err(&opening)?,
    };
    if format == ImageFormat::Raw {
        errln!("{}: This image format does not support checks", tool.name());
        return Ok(CODE_UNSUPPORTED);
    }
    let mut tell = |finding: &Finding| errln!("{finding}");
    let failing = |error: stillpoint_io::Error| match error.kind() {
        Kind::Invalid | Kind::Corrupt | Kind::Unsupported => opening(error),
        _ => Complaint { before: "Check failed: ".to_owned(), ..opening(error) },
    };
    let mut report = check(queue, &file, repair, &mut tell).await.map_err(failing)?;
    if report.corruptions_fixed + report.leaks_fixed > 0 {
        if args.output == Output::Human && !args.quiet {
            outln!(
                "The following inconsistencies were found and repaired:\n\n    {} leaked \
                 clusters\n    {} corruptions\n\nDouble checking the fixed image now...",
                report.leaks_fixed,
                report.corruptions_fixed
            );
        }
        // What is told in the end is what a second look has seen.
        let again = check(queue, &file, Repair::Nothing, &mut |_| {}).await.map_err(failing)?;
        report = Report {
            corruptions_fixed: report.corruptions_fixed,
            leaks_fixed: report.leaks_fixed,
            ..again
        };
    }
    match args.output {
        Output::Human if args.quiet => {}
        Output::Human => print_report(&report),
        Output::Json => text::print_json(&report_json(&report, &target.name)),
    }
    Ok(match report {
        Report { corruptions: 1.., .. } => CODE_CORRUPT,
        Report { leaks: 1.., .. } => CODE_LEAKS,
        _ => 0,
    })
}

fn print_report(report: &Report) {
    if report.corruptions + report.leaks == 0 {
        outln!("No errors were found on the image.");
    }
    if report.corruptions > 0 {
        outln!(
            "\n{} errors were found on the image.\nData may be corrupted, or further writes to the \
             image may corrupt it.",
            report.corruptions
        );
    }
    if report.leaks > 0 {
        outln!(
            "\n{} leaked clusters were found on the image.\nThis means waste of disk space, but no \
             harm to data.",
            report.leaks
        );
    }
    if report.allocated_clusters > 0 && report.total_clusters > 0 {
        let percent = |part: u64, whole: u64| part as f64 * 100.0 / whole as f64;
        outln!(
            "{}/{} = {:.2}% allocated, {:.2}% fragmented, {:.2}% compressed clusters",
            report.allocated_clusters,
            report.total_clusters,
            percent(report.allocated_clusters, report.total_clusters),
            percent(report.fragmented_clusters, report.allocated_clusters),
            percent(report.compressed_clusters, report.allocated_clusters),
        );
    }
    if report.image_end_offset > 0 {
        outln!("Image end offset: {}", report.image_end_offset);
    }
}

/// Numbers that are 0 are left out, but that of failures.
fn report_json(report: &Report, name: &str) -> Value {
    let mut json = Map::new();
    for (key, number) in [
        ("image-end-offset", report.image_end_offset),
        ("corruptions", report.corruptions),
        ("leaks", report.leaks),
        ("corruptions-fixed", report.corruptions_fixed),
        ("leaks-fixed", report.leaks_fixed),
        ("total-clusters", report.total_clusters),
        ("allocated-clusters", report.allocated_clusters),
        ("fragmented-clusters", report.fragmented_clusters),
        ("compressed-clusters", report.compressed_clusters),
    ] {
        if number > 0 {
            json.insert(key.to_owned(), number.into());
        }
    }
    json.insert("check-errors".to_owned(), 0.into());
    json.insert("filename".to_owned(), name.into());
    json.insert("format".to_owned(), "qcow2".into());
    Value::Object(json)
}
